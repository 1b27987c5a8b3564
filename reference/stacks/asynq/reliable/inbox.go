// Package reliable makes effects of asynq tasks happen once, and brings tasks back that crashed.
//
// Promise: what Announce wrote reaches its queue if, and only if, its transaction committed. What a handler returns is
// committed once per key, with its marker. The class of an error decides: RetryAfter waits and consumes no retry,
// asynq.SkipRetry archives, all else is retried with full jitter. A task whose process died runs again after Lease
// (asynq's own recovery takes one to two minutes and has no setting), and is archived after Crashes of them. Sweep keeps
// archived tasks in the database; asynq deletes them beyond 10,000.
//
// When it does not hold: effects outside the database. Give the provider a key of the business id, for as long as it
// remembers keys; without keys, look up before you repeat.
package reliable

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/hibiken/asynq"
)

// Tables for SQLite; PostgreSQL takes them with DOUBLE PRECISION for REAL, and $1 for ? in the statements.
const Tables = `
CREATE TABLE IF NOT EXISTS inbox (kind TEXT, key TEXT, fingerprint TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (kind, key));
CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY, queue TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (kind TEXT, key TEXT, queue TEXT NOT NULL, data TEXT NOT NULL, lease REAL, crashes INTEGER NOT NULL,
  PRIMARY KEY (kind, key));
CREATE TABLE IF NOT EXISTS dead_letters (kind TEXT, key TEXT, queue TEXT NOT NULL, data TEXT NOT NULL, task TEXT NOT NULL,
  reason TEXT NOT NULL, PRIMARY KEY (kind, key));`

// ErrKeyReused says that one key was used for two payloads.
var ErrKeyReused = fmt.Errorf("the key was used for another payload: %w", asynq.SkipRetry)

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

// [once]

// Once commits effect with its marker, unless that was done before.
func (s Store) Once(ctx context.Context, kind, key string, data []byte, effect Effect) error {
	sum := sha256.Sum256(data)
	mark := hex.EncodeToString(sum[:])
	return s.Transaction(ctx, func(tx *sql.Tx) error {
		// The marker goes first: a concurrent duplicate waits here for our commit and then finds the row.
		done, err := tx.Exec("INSERT INTO inbox (kind, key, fingerprint, at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", kind, key, mark, now())
		if err != nil {
			return err
		}
		if n, _ := done.RowsAffected(); n == 1 {
			if err := effect(tx); err != nil {
				return err
			}
		} else {
			var stored string
			if err := tx.QueryRow("SELECT fingerprint FROM inbox WHERE kind = ? AND key = ?", kind, key).Scan(&stored); err != nil {
				return err
			}
			if stored != mark {
				return ErrKeyReused
			}
		}
		_, err = tx.Exec("DELETE FROM runs WHERE kind = ? AND key = ?", kind, key)
		return err
	})
}

// [/once]

// Announce sends a task when tx commits, in place of client.Enqueue.
func Announce(tx *sql.Tx, queue, kind, key string, data any) error {
	text, err := json.Marshal(data)
	if err == nil {
		_, err = tx.Exec("INSERT INTO outbox (queue, kind, key, data) VALUES (?, ?, ?, ?)", queue, kind, key, string(text))
	}
	return err
}

// Relay moves what was announced to the queues. Any number of processes may call it: a task that two of them send has one id.
func (s Store) Relay(ctx context.Context, client *asynq.Client, options ...asynq.Option) error {
	rows, err := s.DB.QueryContext(ctx, "SELECT id, queue, kind, key, data FROM outbox ORDER BY id LIMIT 100")
	if err != nil {
		return err
	}
	type row struct {
		id                     int64
		queue, kind, key, data string
	}
	var due []row
	for rows.Next() {
		var one row
		if err := rows.Scan(&one.id, &one.queue, &one.kind, &one.key, &one.data); err != nil {
			return errors.Join(err, rows.Close())
		}
		due = append(due, one)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return err
	}
	for _, one := range due {
		if err := enqueue(ctx, client, one.queue, one.kind, one.key, one.key, one.data, options...); err != nil {
			return err
		}
		if _, err := s.DB.ExecContext(ctx, "DELETE FROM outbox WHERE id = ?", one.id); err != nil {
			return err
		}
	}
	return nil
}

func enqueue(ctx context.Context, client *asynq.Client, queue, kind, key, id, data string, options ...asynq.Option) error {
	payload, err := json.Marshal(message{key, json.RawMessage(data)})
	if err != nil {
		return err
	}
	options = append([]asynq.Option{asynq.Queue(queue), asynq.TaskID(kind + "/" + id)}, options...)
	_, err = client.EnqueueContext(ctx, asynq.NewTask(kind, payload), options...)
	// It is there already. So is an archived one: Replay deletes it first, or the new task would be swallowed here.
	if errors.Is(err, asynq.ErrTaskIDConflict) {
		return nil
	}
	return err
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

func now() float64 { return float64(time.Now().UnixMilli()) / 1000 }
