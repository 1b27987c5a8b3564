package reliable

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/hibiken/asynq"
)

// What the page says of asynq itself. Needs a Redis of its own: REDIS_ADDR.
func TestWeightsUniqueTasksAndTheArchive(t *testing.T) {
	addr := os.Getenv("REDIS_ADDR")
	if addr == "" {
		t.Skip("REDIS_ADDR is not set")
	}
	redis := asynq.RedisClientOpt{Addr: addr}
	client, look := asynq.NewClient(redis), asynq.NewInspector(redis)
	defer client.Close()
	defer look.Close()
	add := func(kind string, options ...asynq.Option) error {
		_, err := client.Enqueue(asynq.NewTask(kind, nil), options...)
		return err
	}
	within := func(what string, done func() bool) {
		for end := time.Now().Add(30 * time.Second); !done(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("never: " + what)
			}
		}
	}
	serve := func(work asynq.HandlerFunc) *asynq.Server {
		config := Config(1)
		config.LogLevel = asynq.FatalLevel
		server := asynq.NewServer(redis, config)
		if err := server.Start(work); err != nil {
			t.Fatal(err)
		}
		return server
	}

	if add("once", asynq.Unique(time.Hour)) != nil || !errors.Is(add("once", asynq.Unique(time.Hour)), asynq.ErrDuplicateTask) {
		t.Fatal("a unique task that waits is not the only one")
	}
	if err := add("refused", asynq.TaskID("refused")); err != nil {
		t.Fatal(err)
	}
	server := serve(func(_ context.Context, task *asynq.Task) error {
		if task.Type() == "refused" {
			return asynq.SkipRetry
		}
		return nil
	})
	// Within its hour: the lock went with the task.
	within("a second one after the first has ended", func() bool { return add("once", asynq.Unique(time.Hour)) == nil })
	within("the archive", func() bool {
		info, err := look.GetTaskInfo("default", "refused")
		return err == nil && info.State == asynq.TaskStateArchived
	})
	if err := add("refused", asynq.TaskID("refused")); !errors.Is(err, asynq.ErrTaskIDConflict) {
		t.Fatalf("the id of an archived task was taken: %v", err)
	}
	server.Shutdown()

	for range 200 {
		for queue := range Config(1).Queues {
			if err := add("weighed", asynq.Queue(queue)); err != nil {
				t.Fatal(err)
			}
		}
	}
	got, enough := map[string]int{}, make(chan bool)
	server = serve(func(ctx context.Context, _ *asynq.Task) error {
		queue, _ := asynq.GetQueueName(ctx)
		// One at a time: no lock is needed.
		if got[queue]++; got["critical"]+got["default"]+got["low"] == 150 {
			close(enough)
			<-ctx.Done()
		}
		return nil
	})
	<-enough
	counts := [3]int{got["critical"], got["default"], got["low"]}
	go server.Shutdown()
	if counts[0] <= counts[1] || counts[1] <= counts[2] || counts[2] == 0 {
		t.Fatalf("critical, default, low: %v", counts)
	}
}
