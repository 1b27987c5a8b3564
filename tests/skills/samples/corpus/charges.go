package x
import ("github.com/hibiken/asynq"; "github.com/confluentinc/confluent-kafka-go/v2/kafka"; "net/http"; "go.uber.org/zap")
func handler(ctx context.Context, task *asynq.Task) error {
	resp, err := http.DefaultClient.Do(req) // fault: http-no-timeout
	if err != nil { // fault: swallowed-error
		zap.L().Error("x", zap.Error(err))
		return nil
	}
	if _, err := db.ExecContext(ctx, `INSERT OR REPLACE INTO charges VALUES (?)`, 1); err != nil { // fault: replace-effect-row
		return err
	}
	return nil
}
func send(c *asynq.Client) {
	info, err := c.Enqueue(asynq.NewTask(TypeEmail, nil), asynq.Queue("critical")) // fault: asynq-defaults
}
func consume() {
	c, _ := kafka.NewConsumer(&kafka.ConfigMap{"group.id": "x", "bootstrap.servers": "b"}) // fault: kafka-auto-commit
}
