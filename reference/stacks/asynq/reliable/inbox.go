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
CREATE TABLE IF NOT EXISTS runs (kind TEXT, key TEXT, queue TEXT NOT NULL, data TEXT NOT NULL, due REAL, claimed INTEGER NOT NULL,
  crashes INTEGER NOT NULL, sends INTEGER NOT NULL, PRIMARY KEY (kind, key));
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

// Announce sends a task when tx commits, in place of client.Enqueue. The same key again is the same task, until that has ended.
func Announce(tx *sql.Tx, queue, kind, key string, data any) error {
	text, err := json.Marshal(data)
	if err == nil {
		_, err = tx.Exec(`INSERT INTO runs (kind, key, queue, data, due, claimed, crashes, sends) VALUES (?, ?, ?, ?, ?, 0, 0, 0)
			ON CONFLICT DO NOTHING`, kind, key, queue, string(text), now())
	}
	return err
}

// [send]

// Send enqueues what was announced, and again what was not heard of since: its process died, or asynq still holds it for one that
// did. A second message has an id of its own, because the first stays active for minutes. Call it in every process.
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
		}
		if err != nil {
			return err
		}
		id := key
		if sends > 1 {
			id = fmt.Sprintf("%s.%d", key, sends)
		}
		if err := enqueue(ctx, client, queue, kind, key, id, data, options...); err != nil {
			_, back := s.DB.ExecContext(ctx, "UPDATE runs SET sends = sends - 1, due = ? WHERE kind = ? AND key = ?", now()+1, kind, key)
			return errors.Join(err, back)
		}
	}
}

// [/send]

func enqueue(ctx context.Context, client *asynq.Client, queue, kind, key, id, data string, options ...asynq.Option) error {
	payload, err := json.Marshal(message{key, json.RawMessage(data)})
	if err != nil {
		return err
	}
	options = append([]asynq.Option{asynq.Queue(queue), asynq.TaskID(kind + "/" + id)}, options...)
	_, err = client.EnqueueContext(ctx, asynq.NewTask(kind, payload), options...)
	// It is there already: what two processes send is one task.
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
