// Labels, mails and the nightly manifest of a shop: shop worker | create | submit PARCEL… | replay KIND KEY
package main

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
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

type mail struct{ Parcel, Label string }
type night struct{ Slot int64 }
type parcel struct {
	Parcel, Address string
	Crash           bool
}

// Without a timeout a hung provider keeps its goroutine forever.
var client = &http.Client{Timeout: 4 * time.Second}

func post(ctx context.Context, url string, body map[string]any, key string) (id string, err error) {
	text, _ := json.Marshal(body)
	request, err := http.NewRequestWithContext(ctx, "POST", url, bytes.NewReader(text))
	if err != nil {
		return "", err
	}
	request.Header = http.Header{"Content-Type": {"application/json"}, "Idempotency-Key": {key}}
	answer, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	failed := fmt.Errorf("HTTP %d", answer.StatusCode)
	switch status := answer.StatusCode; {
	case status == 429:
		seconds, _ := strconv.Atoi(answer.Header.Get("Retry-After"))
		return "", &reliable.RetryAfter{Delay: time.Duration(cmp.Or(seconds, 5)) * time.Second, Err: failed}
	case status >= 500 || slices.Contains([]int{408, 409, 425}, status):
		return "", failed
	case status >= 400:
		return "", fmt.Errorf("%w: %w", failed, asynq.SkipRetry)
	}
	var made struct{ ID string }
	err = json.NewDecoder(answer.Body).Decode(&made)
	return made.ID, err
}

func handlers(store reliable.Store, carrier, mailer string) *asynq.ServeMux {
	mux := asynq.NewServeMux()
	reliable.Handle(mux, store, "label", func(ctx context.Context, order parcel) (reliable.Effect, error) {
		if order.Crash { // as the kernel does when memory runs out
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		if order.Address == "" {
			return nil, fmt.Errorf("the parcel has no address: %w", asynq.SkipRetry)
		}
		label, err := post(ctx, carrier+"/labels", map[string]any{"parcel": order.Parcel}, "label/"+order.Parcel)
		return func(tx *sql.Tx) error {
			if _, err := tx.Exec("INSERT INTO labels (parcel, label) VALUES (?, ?)", order.Parcel, label); err != nil {
				return err
			}
			return reliable.Announce(tx, "default", "mail", order.Parcel, mail{order.Parcel, label})
		}, err
	})
	reliable.Handle(mux, store, "mail", func(ctx context.Context, one mail) (reliable.Effect, error) {
		_, err := post(ctx, mailer+"/mails", map[string]any{"parcel": one.Parcel, "label": one.Label}, "mail/"+one.Parcel)
		return writes("INSERT INTO mailed (parcel, label) VALUES (?, ?)", one.Parcel, one.Label), err
	})
	reliable.Handle(mux, store, "manifest", func(ctx context.Context, one night) (reliable.Effect, error) {
		_, err := post(ctx, carrier+"/manifests", map[string]any{"slot": one.Slot}, fmt.Sprintf("manifest/%d", one.Slot))
		return writes("INSERT INTO manifests (slot) VALUES (?)", one.Slot), err
	})
	return mux
}

func writes(statement string, values ...any) reliable.Effect {
	return func(tx *sql.Tx) error {
		_, err := tx.Exec(statement, values...)
		return err
	}
}

// [slots]

// tick announces the manifest of this slot, once, however many processes call it. asynq.Scheduler enqueues in each of them.
func tick(store reliable.Store, every time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		slot := time.Now().UnixNano() / int64(every)
		return store.Transaction(ctx, func(tx *sql.Tx) error {
			first, err := reliable.Changed(tx.Exec("INSERT INTO slots (slot) VALUES (?) ON CONFLICT DO NOTHING", slot))
			if !first || err != nil {
				return err
			}
			return reliable.Announce(tx, "low", "manifest", strconv.FormatInt(slot, 10), night{slot})
		})
	}
}

// [/slots]

func work(store reliable.Store, redis asynq.RedisConnOpt) error {
	lease, _ := time.ParseDuration(os.Getenv("LEASE"))
	reliable.Lease = cmp.Or(lease, reliable.Lease)
	night, _ := time.ParseDuration(os.Getenv("NIGHT"))
	night = cmp.Or(night, 24*time.Hour)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	server := asynq.NewServer(redis, reliable.Config(10))
	client, inspector := asynq.NewClient(redis), asynq.NewInspector(redis)
	if err := server.Start(handlers(store, os.Getenv("CARRIER_URL"), os.Getenv("MAILER_URL"))); err != nil {
		return err
	}
	options := reliable.Options(time.Minute)
	go reliable.Every(ctx, "send", 200*time.Millisecond, func(ctx context.Context) error { return store.Send(ctx, client, options...) })
	go reliable.Every(ctx, "sweep", time.Second, func(ctx context.Context) error { return store.Sweep(ctx, inspector) })
	go reliable.Every(ctx, "schedule", night/4, tick(store, night))
	fmt.Println("ready")
	<-ctx.Done()
	server.Shutdown()
	return nil
}

func submit(tx *sql.Tx, order parcel) error {
	first, err := reliable.Changed(tx.Exec("INSERT INTO parcels (parcel) VALUES (?) ON CONFLICT DO NOTHING", order.Parcel))
	if !first || err != nil {
		return err
	}
	return reliable.Announce(tx, "critical", "label", order.Parcel, order)
}

func run(ctx context.Context, verb string, words []string) error {
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
	switch verb {
	case "worker":
		return work(store, redis)
	case "create":
		_, err := db.Exec(reliable.Tables + `CREATE TABLE parcels (parcel TEXT PRIMARY KEY); CREATE TABLE labels (parcel TEXT, label TEXT);
			CREATE TABLE mailed (parcel TEXT, label TEXT); CREATE TABLE slots (slot INTEGER PRIMARY KEY); CREATE TABLE manifests (slot INTEGER)`)
		return err
	case "submit":
		order := parcel{Address: os.Getenv("NOTE"), Crash: slices.Contains(words, "--crash")}
		if slices.Contains(words, "--no-address") {
			order.Address = ""
		}
		return store.Transaction(ctx, func(tx *sql.Tx) (err error) {
			for _, order.Parcel = range words {
				if err == nil && !strings.HasPrefix(order.Parcel, "--") {
					err = submit(tx, order)
				}
			}
			return err
		})
	case "replay":
		return store.Replay(ctx, asynq.NewInspector(redis), words[0], words[1])
	}
	return fmt.Errorf("shop worker | create | submit PARCEL… | replay KIND KEY")
}

func main() {
	if err := run(context.Background(), strings.Join(os.Args[1:min(2, len(os.Args))], ""), os.Args[min(2, len(os.Args)):]); err != nil {
		log.Fatal(err)
	}
}
