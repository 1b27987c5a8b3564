package server

import (
	"context"
	"encoding/json"
	"log/slog"
	"time"

	"github.com/hibiken/asynq"
	"gorm.io/gorm"
)

type Mailer struct{ http *Client }

func (m *Mailer) ProcessTask(ctx context.Context, t *asynq.Task) error {
	var mail Mail
	if err := json.Unmarshal(t.Payload(), &mail); err != nil { // fault: swallowed-error
		slog.Error("bad payload", "err", err)
		return nil
	}
	slog.Info("sending", "to", mail.Email) // fault: secret-logged
	return m.http.Send(ctx, mail)
}

func NewMailTask(id string) (*asynq.Task, error) {
	payload, err := json.Marshal(map[string]string{"id": id})
	if err != nil {
		return nil, err
	}
	return asynq.NewTask("mail", payload), nil // fault: asynq-defaults
}

func Place(db *gorm.DB, client *asynq.Client, order *Order) error {
	return db.Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(order).Error; err != nil {
			return err
		}
		_, err := client.Enqueue(order.Task(), asynq.MaxRetry(5), asynq.Timeout(time.Minute)) // fault: publish-in-transaction
		return err
	})
}

func Schedule(redis asynq.RedisConnOpt) error {
	scheduler := asynq.NewScheduler(redis, nil) // fault: scheduler-per-process
	scheduler.Register("@daily", asynq.NewTask("nightly", nil))
	return scheduler.Run()
}
