// Labels, mails and the nightly manifest of a shop: shop worker | create | submit PARCEL… | dead | replay KIND KEY
package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hibiken/asynq"
	_ "modernc.org/sqlite"

	"shop/reliable"
)

type parcel struct {
	Parcel  string `json:"parcel"`
	Address string `json:"address"`
	Crash   bool   `json:"crash,omitempty"`
}
type mail struct {
	Parcel string `json:"parcel"`
	Label  string `json:"label"`
}
type night struct {
	Slot int64 `json:"slot"`
}

// Without a timeout a hung provider keeps its goroutine forever.
var client = &http.Client{Timeout: 4 * time.Second}

func post(ctx context.Context, url string, body any, key string) (id string, err error) {
	text, err := json.Marshal(body)
	if err != nil {
		return "", err
	}
	request, err := http.NewRequestWithContext(ctx, "POST", url, bytes.NewReader(text))
	if err != nil {
		return "", err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", key)
	answer, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	failed := fmt.Errorf("HTTP %d", answer.StatusCode)
	switch status := answer.StatusCode; {
	case status == 429:
		seconds, err := strconv.ParseFloat(answer.Header.Get("Retry-After"), 64)
		if err != nil {
			seconds = 5
		}
		return "", &reliable.RetryAfter{Delay: time.Duration(seconds * float64(time.Second)), Err: failed}
	case status >= 500 || slices.Contains([]int{408, 409, 425}, status):
		return "", failed
	case status >= 400:
		return "", fmt.Errorf("%w: %w", failed, asynq.SkipRetry)
	}
	var made struct{ ID string }
	return made.ID, errors.Join(json.NewDecoder(answer.Body).Decode(&made), nil)
}

// [tasks]
func handlers(store reliable.Store) *asynq.ServeMux {
	mux := asynq.NewServeMux()
	reliable.Handle(mux, store, "label", func(ctx context.Context, order parcel) (reliable.Effect, error) {
		if order.Crash { // as the kernel does when memory runs out
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		if order.Address == "" {
			return nil, fmt.Errorf("the parcel has no address: %w", asynq.SkipRetry)
		}
		label, err := post(ctx, os.Getenv("CARRIER_URL")+"/labels", map[string]string{"parcel": order.Parcel}, "label/"+order.Parcel)
		return func(tx *sql.Tx) error {
			if _, err := tx.Exec("INSERT INTO labels (parcel, label) VALUES (?, ?)", order.Parcel, label); err != nil {
				return err
			}
			return reliable.Announce(tx, "default", "mail", order.Parcel, mail{order.Parcel, label})
		}, err
	})
	reliable.Handle(mux, store, "mail", func(ctx context.Context, one mail) (reliable.Effect, error) {
		_, err := post(ctx, os.Getenv("MAILER_URL")+"/mails", one, "mail/"+one.Parcel)
		return func(tx *sql.Tx) error {
			_, err := tx.Exec("INSERT INTO mailed (parcel, label) VALUES (?, ?)", one.Parcel, one.Label)
			return err
		}, err
	})
	reliable.Handle(mux, store, "manifest", func(ctx context.Context, one night) (reliable.Effect, error) {
		_, err := post(ctx, os.Getenv("CARRIER_URL")+"/manifests", one, fmt.Sprintf("manifest/%d", one.Slot))
		return func(tx *sql.Tx) error {
			_, err := tx.Exec("INSERT INTO manifests (slot) VALUES (?)", one.Slot)
			return err
		}, err
	})
	return mux
}

// [/tasks]

// [slots]

// tick announces the manifest of this slot, once, however many processes call it. asynq.Scheduler enqueues in each of them.
func tick(store reliable.Store, every time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		slot := time.Now().UnixNano() / int64(every)
		return store.Transaction(ctx, func(tx *sql.Tx) error {
			made, err := tx.Exec("INSERT INTO slots (slot) VALUES (?) ON CONFLICT DO NOTHING", slot)
			if err != nil {
				return err
			}
			if n, _ := made.RowsAffected(); n == 0 {
				return nil
			}
			return reliable.Announce(tx, "low", "manifest", strconv.FormatInt(slot, 10), night{slot})
		})
	}
}

// [/slots]

func work(store reliable.Store, redis asynq.RedisConnOpt) error {
	if lease, err := time.ParseDuration(os.Getenv("LEASE")); err == nil {
		reliable.Lease = lease
	}
	every, err := time.ParseDuration(os.Getenv("NIGHT"))
	if err != nil {
		every = 24 * time.Hour
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	server := asynq.NewServer(redis, reliable.Config(10))
	client, inspector := asynq.NewClient(redis), asynq.NewInspector(redis)
	if err := server.Start(handlers(store)); err != nil {
		return err
	}
	options := reliable.Options(time.Minute)
	go reliable.Every(ctx, "send", 200*time.Millisecond, func(ctx context.Context) error { return store.Send(ctx, client, options...) })
	go reliable.Every(ctx, "sweep", time.Second, func(ctx context.Context) error { return store.Sweep(ctx, inspector) })
	go reliable.Every(ctx, "schedule", every/4, tick(store, every))
	fmt.Println("ready")
	<-ctx.Done()
	server.Shutdown()
	return nil
}

func submit(store reliable.Store, parcels []string, address string, crash bool) error {
	return store.Transaction(context.Background(), func(tx *sql.Tx) error {
		for _, one := range parcels {
			made, err := tx.Exec("INSERT INTO parcels (parcel) VALUES (?) ON CONFLICT DO NOTHING", one)
			if err != nil {
				return err
			}
			if n, _ := made.RowsAffected(); n == 0 {
				continue
			}
			if err := reliable.Announce(tx, "critical", "label", one, parcel{one, address, crash}); err != nil {
				return err
			}
		}
		return nil
	})
}

func run(verb string, rest []string) error {
	db, err := sql.Open("sqlite", "file:"+os.Getenv("STORE")+"?_pragma=busy_timeout(15000)&_pragma=journal_mode(WAL)&_txlock=immediate")
	if err != nil {
		return err
	}
	defer db.Close()
	store := reliable.Store{DB: db}
	redis, err := asynq.ParseRedisURI(os.Getenv("REDIS_URL"))
	if err != nil {
		return err
	}
	words := slices.DeleteFunc(slices.Clone(rest), func(word string) bool { return strings.HasPrefix(word, "--") })
	switch verb {
	case "worker":
		return work(store, redis)
	case "create":
		_, err := db.Exec(reliable.Tables + `CREATE TABLE parcels (parcel TEXT PRIMARY KEY); CREATE TABLE labels (parcel TEXT, label TEXT);
			CREATE TABLE mailed (parcel TEXT, label TEXT); CREATE TABLE slots (slot INTEGER PRIMARY KEY); CREATE TABLE manifests (slot INTEGER)`)
		return err
	case "submit":
		address := os.Getenv("NOTE")
		if slices.Contains(rest, "--no-address") {
			address = ""
		}
		return submit(store, words, address, slices.Contains(rest, "--crash"))
	case "replay":
		return store.Replay(context.Background(), asynq.NewInspector(redis), words[0], words[1])
	}
	return fmt.Errorf("shop worker | create | submit PARCEL… | replay KIND KEY")
}

func main() {
	if err := run(strings.Join(os.Args[1:min(2, len(os.Args))], ""), os.Args[min(2, len(os.Args)):]); err != nil {
		log.Fatal(err)
	}
}
