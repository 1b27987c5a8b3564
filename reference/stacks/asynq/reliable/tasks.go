package reliable

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"time"

	"github.com/hibiken/asynq"
)

// Lease: a run that has not been heard of for so long is taken over. Crashes: so many of them, and the task is archived.
var (
	Lease   = 10 * time.Second
	Crashes = 4
)

// RetryAfter says when to come back; it consumes no retry.
type RetryAfter struct {
	Delay time.Duration
	Err   error
}

func (e *RetryAfter) Error() string { return e.Err.Error() }

// [settings]

// Config is asynq's with defaults that survive: weighted queues, full jitter, waits that consume no retry.
func Config(concurrency int) asynq.Config {
	return asynq.Config{
		Concurrency: concurrency,
		// Of ten tasks about six are critical, three default, one low: none of them starves.
		Queues: map[string]int{"critical": 6, "default": 3, "low": 1},
		RetryDelayFunc: func(n int, err error, _ *asynq.Task) time.Duration {
			var later *RetryAfter
			if errors.As(err, &later) {
				// asynq cuts the time to whole seconds: without one more it would come too early.
				return later.Delay + time.Second
			}
			return time.Duration(rand.Float64() * float64(min(time.Minute, time.Second<<min(n, 10))))
		},
		IsFailure: func(err error) bool {
			var later *RetryAfter
			// A crash is no failed attempt; claim counts crashes.
			return !errors.As(err, &later) && !errors.Is(err, asynq.ErrLeaseExpired)
		},
		// Retries are looked for every 5 s by default.
		DelayedTaskCheckInterval: time.Second,
		// Less than the platform's grace; what has not ended by then goes back to the queue.
		ShutdownTimeout: 20 * time.Second,
	}
}

// Options of every task: 25 retries and 30 minutes are the defaults.
func Options(longest time.Duration) []asynq.Option {
	return []asynq.Option{asynq.MaxRetry(8), asynq.Timeout(longest)}
}

// [/settings]

// [handle]

// Handle registers run for a kind of task: slow and outside work there, what it returns is committed once.
func Handle[T any](mux *asynq.ServeMux, s Store, kind string, run func(context.Context, T) (Effect, error)) {
	mux.HandleFunc(kind, func(ctx context.Context, task *asynq.Task) (err error) {
		var told message
		var data T
		if err := errors.Join(json.Unmarshal(task.Payload(), &told), json.Unmarshal(told.Data, &data)); err != nil {
			return fmt.Errorf("%s cannot be read: %w", kind, asynq.SkipRetry)
		}
		queue, _ := asynq.GetQueueName(ctx)
		if done, err := s.claim(ctx, kind, queue, told); done || err != nil {
			return err
		}
		renewing, stop := context.WithCancel(ctx)
		go Every(renewing, "lease", Lease/4, func(ctx context.Context) error { return s.renew(ctx, kind, told.Key) })
		defer func() {
			stop()
			if err != nil { // asynq has it again, to retry or to archive
				_, ended := s.DB.Exec("UPDATE runs SET due = NULL, claimed = 0 WHERE kind = ? AND key = ?", kind, told.Key)
				err = errors.Join(err, ended)
			}
		}()
		effect, err := run(ctx, data)
		if err != nil {
			return err
		}
		return s.Once(ctx, kind, told.Key, told.Data, effect)
	})
}

// [/handle]

// claim says whether it was done before, and otherwise who works on it from now on.
func (s Store) claim(ctx context.Context, kind, queue string, told message) (done bool, err error) {
	var crashes int
	err = s.DB.QueryRowContext(ctx, "SELECT count(*) FROM inbox WHERE kind = ? AND key = ?", kind, told.Key).Scan(&crashes)
	if done = crashes > 0; done || err != nil {
		return done, err
	}
	err = s.DB.QueryRowContext(ctx, `INSERT INTO runs (kind, key, queue, data, due, claimed, crashes, sends) VALUES (?, ?, ?, ?, ?, 1, 0, 1)
		ON CONFLICT (kind, key) DO UPDATE SET due = excluded.due, claimed = 1 RETURNING crashes`,
		kind, told.Key, queue, string(told.Data), now()+Lease.Seconds()).Scan(&crashes)
	if err == nil && crashes >= Crashes {
		_, err = s.DB.ExecContext(ctx, "UPDATE runs SET due = NULL, claimed = 0 WHERE kind = ? AND key = ?", kind, told.Key)
		return false, errors.Join(err, fmt.Errorf("its process died %d times: %w", crashes, asynq.SkipRetry))
	}
	return false, err
}

func (s Store) renew(ctx context.Context, kind, key string) error {
	_, err := s.DB.ExecContext(ctx, "UPDATE runs SET due = ? WHERE kind = ? AND key = ? AND claimed = 1", now()+Lease.Seconds(), kind, key)
	return err
}

// [sweep]

// Sweep keeps archived tasks as dead letters; call it every few seconds, from any number of processes.
func (s Store) Sweep(ctx context.Context, inspector *asynq.Inspector) error {
	queues, err := inspector.Queues()
	if err != nil {
		return err
	}
	for _, queue := range queues {
		tasks, err := inspector.ListArchivedTasks(queue, asynq.PageSize(1000))
		if err != nil {
			return err
		}
		for _, task := range tasks {
			var told message
			if json.Unmarshal(task.Payload, &told) != nil {
				told = message{Key: task.ID, Data: json.RawMessage("null")}
			}
			made, err := s.DB.ExecContext(ctx, `INSERT INTO dead_letters (kind, key, queue, data, task, reason) VALUES (?, ?, ?, ?, ?, ?)
				ON CONFLICT DO NOTHING`, task.Type, told.Key, queue, string(told.Data), task.ID, task.LastErr)
			if err != nil {
				return err
			}
			if n, _ := made.RowsAffected(); n == 1 {
				log.Printf("dead letter %s %s: %s", task.Type, told.Key, task.LastErr)
			}
		}
	}
	return nil
}

// Replay runs a dead letter again, with all its retries. (inspector.RunTask would leave it one.)
func (s Store) Replay(ctx context.Context, inspector *asynq.Inspector, kind, key string) error {
	var queue, data, task string
	row := s.DB.QueryRowContext(ctx, "SELECT queue, data, task FROM dead_letters WHERE kind = ? AND key = ?", kind, key)
	if err := row.Scan(&queue, &data, &task); err != nil {
		return fmt.Errorf("%s %s is no dead letter: %w", kind, key, err)
	}
	if err := inspector.DeleteTask(queue, task); err != nil && !errors.Is(err, asynq.ErrTaskNotFound) {
		return err
	}
	return s.Transaction(ctx, func(tx *sql.Tx) error {
		for _, table := range []string{"dead_letters", "runs"} {
			if _, err := tx.Exec("DELETE FROM "+table+" WHERE kind = ? AND key = ?", kind, key); err != nil {
				return err
			}
		}
		return Announce(tx, queue, kind, key, json.RawMessage(data))
	})
}

// [/sweep]
