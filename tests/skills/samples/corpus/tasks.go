package tasks

import (
	"context"
	"database/sql"
	"errors"
	"log"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/hibiken/asynq"
	"github.com/robfig/cron/v3"
)

func enqueue(client *asynq.Client, payload []byte) error {
	_, err := client.Enqueue(asynq.NewTask("mail", payload)) // fault: asynq-defaults
	if err != nil {
		return err
	}
	task := asynq.NewTask("ship", payload, asynq.MaxRetry(5))
	if _, err := client.Enqueue(task, asynq.Queue("low")); err != nil { // fault: asynq-defaults
		return err
	}
	_, err = client.Enqueue(asynq.NewTask("ship", payload), asynq.MaxRetry(5), asynq.Timeout(time.Minute))
	return err
}

func place(db *sql.DB, client *asynq.Client, order string) error {
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.Exec("INSERT OR REPLACE INTO orders VALUES (?)", order); err != nil { // fault: replace-effect-row
		return err
	}
	if _, err := client.Enqueue(task, options...); err != nil { // fault: publish-in-transaction
		return err
	}
	return tx.Commit()
}

func HandleMail(ctx context.Context, t *asynq.Task) error {
	log.Printf("mail %s", t.Payload()) // fault: payload-logged
	answer, err := http.Get("https://mail.example") // fault: http-no-timeout
	if err != nil { // fault: swallowed-error
		log.Printf("mail: %v", err)
		return nil
	}
	defer answer.Body.Close()
	_ = store(ctx, answer) // fault: swallowed-error
	return nil
}

func HandleShip(ctx context.Context, t *asynq.Task) error {
	for i := 0; i < 5; i++ { // fault: inner-retry
		err := ship(ctx, t)
		if err == nil {
			return nil
		}
		time.Sleep(time.Second)
	}
	return errors.New("not shipped")
}

func HandleRight(ctx context.Context, t *asynq.Task) error {
	label, err := find(ctx, t)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	log.Printf("label %s for %s", label.ID, label.Order)
	return nil
}

func charge(request *http.Request, user User) {
	request.Header.Set("Idempotency-Key", uuid.NewString()) // fault: key-per-try
	log.Printf("charging %s", user.Email) // fault: secret-logged
	log.Printf("charging %s", user.ID)
}

func clocks() {
	c := cron.New() // fault: scheduler-per-process
	c.AddFunc("@daily", nightly)
	c.Start()
	for range time.NewTicker(10 * time.Minute).C { // fault: interval-loop
		report()
	}
}

func HandleTwo(ctx context.Context, t *asynq.Task) (*Label, error) {
	label, err := find(ctx, t)
	if err != nil {
		_ = updateState(ctx, "failed")
		return nil, err
	}
	_ = telemetry.Capture(ctx)
	return label, nil
}
