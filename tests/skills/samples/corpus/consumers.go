package consumers

import (
	"context"
	"log"
	"net/http"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"
	"github.com/segmentio/kafka-go"
)

var client = &http.Client{Timeout: 5 * time.Second}
var endless = &http.Client{} // fault: http-no-timeout

func rabbit(ch *amqp.Channel) {
	orders, _ := ch.Consume("orders", "", true, false, false, false, nil) // fault: rabbit-auto-ack
	refunds, _ := ch.Consume("refunds", "", false, false, false, false, nil)
	work(orders, refunds)
}

func read(ctx context.Context) {
	reader := kafka.NewReader(kafka.ReaderConfig{Topic: "orders", GroupID: "mail"})
	for {
		message, err := reader.ReadMessage(ctx) // fault: kafka-auto-commit
		if err != nil {
			return
		}
		handle(message)
	}
}

func fetch(ctx context.Context, reader *kafka.Reader) error {
	message, err := reader.FetchMessage(ctx)
	if err != nil {
		return err
	}
	if err := handle(message); err != nil {
		return err
	}
	return reader.CommitMessages(ctx, message)
}

func streams(ctx context.Context, rdb *redis.Client) {
	rdb.XReadGroup(ctx, &redis.XReadGroupArgs{Group: "mail"}) // fault: stream-no-ack, stream-no-claim
}

func once(ctx context.Context, rdb *redis.Client, key string) error {
	fresh, err := rdb.SetNX(ctx, "seen:"+key, 1, time.Hour).Result() // fault: set-nx-idempotency
	if err != nil || !fresh {
		return err
	}
	return work(key)
}

func token(api API) {
	log.Println("calling with", api.AccessToken) // fault: secret-logged
	log.Println("calling", api.Name)
}

func secretOf(ctx context.Context, rdb *redis.Client, key string, made []byte) ([]byte, error) {
	fresh, err := rdb.SetNX(ctx, key, made, 0).Result()
	if err != nil || fresh {
		return made, err
	}
	return rdb.Get(ctx, key).Bytes()
}
