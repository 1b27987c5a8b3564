// Package reliable makes effects of asynq tasks happen once, and brings tasks back that crashed.
//
// Promise: what Announce wrote reaches its queue if, and only if, its transaction committed. What a handler returns is
// committed once per key, with its marker. The class of an error decides: RetryAfter waits and consumes no retry,
// asynq.SkipRetry archives, all else is retried with full jitter. A task whose process died runs again after Lease
// (asynq's own recovery takes one to two minutes and has no setting), and is archived after Crashes such deaths. Sweep keeps
// archived tasks in the database; asynq deletes them beyond 10,000.
//
// When it does not hold: effects outside the database. Give the provider a key of the business id, for as long as it
// remembers keys; without keys, look up before you repeat.
package reliable

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"time"

	"github.com/hibiken/asynq"
)

// Tables for SQLite; PostgreSQL takes them with DOUBLE PRECISION for REAL, and $1 for ? in the statements.
const Tables = `
CREATE TABLE IF NOT EXISTS inbox (kind TEXT, key TEXT, fingerprint TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (kind, key));
CREATE TABLE IF NOT EXISTS runs (kind TEXT, key TEXT, queue TEXT NOT NULL, data TEXT NOT NULL, due REAL, claimed INTEGER NOT NULL,
  crashes INTEGER NOT NULL, sends INTEGER NOT NULL, PRIMARY KEY (kind, key));
CREATE TABLE IF NOT EXISTS dead_letters (kind TEXT, key TEXT, queue TEXT NOT NULL, data TEXT NOT NULL, task TEXT NOT NULL,
  reason TEXT NOT NULL, PRIMARY KEY (kind, key));`

// Lease: a run silent for this long is taken over. Crashes: after this many the task is archived.
var Lease, Crashes = 10 * time.Second, 4

// ErrKeyReused says that one key was used for two payloads; the second one is a dead letter.
var ErrKeyReused = fmt.Errorf("the key was used for another payload: %w", asynq.SkipRetry)

// RetryAfter says when to come back; it consumes no retry.
type RetryAfter struct {
	Delay time.Duration
	Err   error
}

func (e *RetryAfter) Error() string { return e.Err.Error() }

// Effect writes what a task has to write, in the transaction of its marker.
type Effect func(tx *sql.Tx) error

// message is the payload of every task: the key is the business id, equal in every retry, crash and replay.
type message struct {
	Key  string          `json:"key"`
	Data json.RawMessage `json:"data"`
}

// Store is where markers, announcements, leases and dead letters are kept.
type Store struct{ DB *sql.DB }

// Transaction commits what work did, or nothing.
func (s Store) Transaction(ctx context.Context, work func(*sql.Tx) error) error {
	tx, err := s.DB.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := work(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// Changed says whether a statement wrote a row.
func Changed(done sql.Result, err error) (bool, error) {
	if err != nil {
		return false, err
	}
	rows, err := done.RowsAffected()
	return rows > 0, err
}

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
				// asynq truncates to whole seconds: without one more the task would come too early.
				return later.Delay + time.Second
			}
			return time.Duration(rand.Float64() * float64(min(time.Minute, time.Second<<min(n, 10))))
		},
		IsFailure: func(err error) bool {
			var later *RetryAfter
			// A crash is not a failed attempt; claim counts crashes.
			return !errors.As(err, &later) && !errors.Is(err, asynq.ErrLeaseExpired)
		},
		// By default an idle server looks for tasks every second, and for retries every 5 s.
		TaskCheckInterval:        100 * time.Millisecond,
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
		done, crashes, err := s.claim(ctx, kind, queue, told)
		if done || err != nil {
			return err
		}
		renewing, stop := context.WithCancel(ctx)
		go Every(renewing, "lease", Lease/4, func(ctx context.Context) error {
			return s.exec(ctx, "UPDATE runs SET due = ? WHERE kind = ? AND key = ? AND claimed = 1", now()+Lease.Seconds(), kind, told.Key)
		})
		defer func() {
			stop()
			if err != nil { // asynq has it again, to retry or to archive
				ended := "UPDATE runs SET due = NULL, claimed = 0 WHERE kind = ? AND key = ?"
				err = errors.Join(err, s.exec(context.Background(), ended, kind, told.Key))
			}
		}()
		if crashes >= Crashes {
			return fmt.Errorf("its process died %d times: %w", crashes, asynq.SkipRetry)
		}
		effect, err := run(ctx, data)
		if err != nil {
			return err
		}
		return s.once(ctx, kind, told, effect)
	})
}

// [/handle]

// claim says whether the task was done before, and otherwise who works on it now.
func (s Store) claim(ctx context.Context, kind, queue string, told message) (done bool, crashes int, err error) {
	var stored string
	err = s.DB.QueryRowContext(ctx, "SELECT fingerprint FROM inbox WHERE kind = ? AND key = ?", kind, told.Key).Scan(&stored)
	if err == nil {
		// Announced once more after its end: nothing is left to send.
		err = s.exec(ctx, "DELETE FROM runs WHERE kind = ? AND key = ?", kind, told.Key)
		if stored != fingerprint(told.Data) {
			err = errors.Join(ErrKeyReused, err)
		}
		return true, 0, err
	} else if !errors.Is(err, sql.ErrNoRows) {
		return
	}
	err = s.DB.QueryRowContext(ctx, `INSERT INTO runs (kind, key, queue, data, due, claimed, crashes, sends) VALUES (?, ?, ?, ?, ?, 1, 0, 1)
		ON CONFLICT (kind, key) DO UPDATE SET due = excluded.due, claimed = 1 RETURNING crashes`,
		kind, told.Key, queue, string(told.Data), now()+Lease.Seconds()).Scan(&crashes)
	return
}

func (s Store) exec(ctx context.Context, statement string, values ...any) error {
	_, err := s.DB.ExecContext(ctx, statement, values...)
	return err
}

// once commits effect with its marker, unless that was done before.
func (s Store) once(ctx context.Context, kind string, told message, effect Effect) error {
	return s.Transaction(ctx, func(tx *sql.Tx) error {
		// The marker goes first: a concurrent duplicate waits here for our commit and then finds the row.
		first, err := Changed(tx.Exec("INSERT INTO inbox (kind, key, fingerprint, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
			kind, told.Key, fingerprint(told.Data), now()))
		if err == nil && first {
			err = effect(tx)
		}
		if err == nil {
			_, err = tx.Exec("DELETE FROM runs WHERE kind = ? AND key = ?", kind, told.Key)
		}
		return err
	})
}

// Announce sends a task when tx commits, in place of client.Enqueue. The same key again is the same task, until it has ended.
func Announce(tx *sql.Tx, queue, kind, key string, data any) error {
	text, err := json.Marshal(data)
	if err == nil {
		_, err = tx.Exec(`INSERT INTO runs (kind, key, queue, data, due, claimed, crashes, sends) VALUES (?, ?, ?, ?, ?, 0, 0, 0)
			ON CONFLICT DO NOTHING`, kind, key, queue, string(text), now())
	}
	return err
}

// Send enqueues what was announced, and again what was not heard of since: its process died, or asynq still holds it for a
// dead one. A second message has an id of its own, because the first stays active for minutes. Call it in every process.
func (s Store) Send(ctx context.Context, client *asynq.Client, options ...asynq.Option) error {
	for {
		var queue, kind, key, data string
		var sends int
		// Each time later than the time before: a long backlog must not be sent again every few seconds.
		err := s.DB.QueryRowContext(ctx, `UPDATE runs SET sends = sends + 1, crashes = crashes + claimed, claimed = 0,
			due = ? + ? * (1 << min(sends, 8)) WHERE (kind, key) IN (SELECT kind, key FROM runs WHERE due <= ? LIMIT 1)
			RETURNING queue, kind, key, data, sends`, now(), Lease.Seconds(), now()).Scan(&queue, &kind, &key, &data, &sends)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		} else if err != nil {
			return err
		}
		id := fmt.Sprintf("%s/%s", kind, key)
		if sends > 1 {
			id = fmt.Sprintf("%s.%d", id, sends)
		}
		payload, _ := json.Marshal(message{key, json.RawMessage(data)})
		_, err = client.EnqueueContext(ctx, asynq.NewTask(kind, payload), append(options, asynq.Queue(queue), asynq.TaskID(id))...)
		// A conflict: it is there already. What two processes send is one task.
		if err != nil && !errors.Is(err, asynq.ErrTaskIDConflict) {
			back := "UPDATE runs SET sends = sends - 1, due = ? WHERE kind = ? AND key = ?"
			return errors.Join(err, s.exec(ctx, back, now()+1, kind, key))
		}
	}
}

// Sweep keeps archived tasks as dead letters; call it every few seconds, from any number of processes.
func (s Store) Sweep(ctx context.Context, inspector *asynq.Inspector) error {
	queues, err := inspector.Queues()
	for _, queue := range queues {
		tasks, unread := inspector.ListArchivedTasks(queue, asynq.PageSize(1000))
		err = errors.Join(err, unread)
		for _, task := range tasks {
			var told message
			if json.Unmarshal(task.Payload, &told) != nil {
				told = message{Key: task.ID, Data: json.RawMessage("null")}
			}
			made, unkept := Changed(s.DB.ExecContext(ctx, `INSERT INTO dead_letters (kind, key, queue, data, task, reason)
				VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`, task.Type, told.Key, queue, string(told.Data), task.ID, task.LastErr))
			if made {
				log.Printf("dead letter %s %s: %s", task.Type, told.Key, task.LastErr)
			}
			err = errors.Join(err, unkept)
		}
	}
	return err
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
		_, err := tx.Exec("DELETE FROM dead_letters WHERE kind = ? AND key = ?", kind, key)
		_, also := tx.Exec("DELETE FROM runs WHERE kind = ? AND key = ?", kind, key)
		return errors.Join(err, also, Announce(tx, queue, kind, key, json.RawMessage(data)))
	})
}

// Every calls step until ctx ends; an error is logged and tried again.
func Every(ctx context.Context, name string, pause time.Duration, step func(context.Context) error) {
	for ctx.Err() == nil {
		if err := step(ctx); err != nil && ctx.Err() == nil {
			log.Printf("%s: %v", name, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

func fingerprint(data []byte) string { return fmt.Sprintf("%x", sha256.Sum256(data)) }

func now() float64 { return float64(time.Now().UnixMilli()) / 1000 }
