// asynq: the same verbs, kinds of work and records as shared/contest.py.
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/hibiken/asynq"
)

type job struct {
	N    int64  `json:"n"`
	Sent int64  `json:"sent"`
	Kind string `json:"kind"`
	Body string `json:"body"`
}

var (
	flags       = flag.NewFlagSet("peer", flag.ExitOnError)
	url         = flags.String("url", "", "")
	queue       = flags.String("queue", "bench", "")
	tally       = flags.String("tally", "", "")
	concurrency = flags.Int("concurrency", 50, "")
	takeover    = flags.Float64("takeover", 0, "")
	tries       = flags.Int("tries", 25, "")
	jobs        = flags.Int("jobs", 0, "")
	kind        = flags.String("kind", "noop", "")
	payload     = flags.Int("payload", 0, "")
	rate        = flags.Float64("rate", 0, "")
	first       = flags.Int("first", 0, "")
	delay       = flags.Float64("delay", 0, "")
	_           = flags.Int("processes", 1, "")
)

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return value
}

func appending(path string) *os.File {
	return must(os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644))
}

func compute(limit time.Duration) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	spent := func() time.Duration {
		var used syscall.Rusage
		syscall.Getrusage(1, &used) // RUSAGE_THREAD
		return time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	for end := spent() + limit; spent() < end; {
	}
}

func work() {
	records := appending(*tally)
	// No SQLite in Go's standard library: the row of a job is a line of a file.
	insert := func(n int64) { fmt.Fprintf(appending(os.Getenv("BENCH_STORE")+".rows"), "%d\n", n) }
	config := asynq.Config{Concurrency: *concurrency, Queues: map[string]int{*queue: 1}, LogLevel: asynq.ErrorLevel,
		TaskCheckInterval: 50 * time.Millisecond}
	if *takeover > 0 {
		config.RetryDelayFunc = func(int, error, *asynq.Task) time.Duration { return time.Second }
	}
	handle := func(_ context.Context, task *asynq.Task) error {
		started := time.Now().UnixNano()
		var each job
		if err := json.Unmarshal(task.Payload(), &each); err != nil {
			return err
		}
		note := func() {
			record := make([]byte, 0, 32)
			for _, field := range []int64{each.N, each.Sent, started, time.Now().UnixNano()} {
				record = binary.LittleEndian.AppendUint64(record, uint64(field))
			}
			records.Write(record)
		}
		switch each.Kind {
		case "io5":
			time.Sleep(5 * time.Millisecond)
		case "hold":
			note()
			time.Sleep(time.Hour)
		case "cpu20":
			compute(20 * time.Millisecond)
		case "row":
			time.Sleep(20 * time.Millisecond)
			insert(each.N)
			time.Sleep(20 * time.Millisecond)
		case "begin":
			insert(each.N)
			time.Sleep(30 * time.Second)
		}
		note()
		if each.Kind == "fail" {
			return errors.New("on purpose")
		}
		return nil
	}
	server := asynq.NewServer(must(asynq.ParseRedisURI(*url)), config)
	must(0, server.Run(asynq.HandlerFunc(handle)))
}

func enqueue() {
	client := asynq.NewClient(must(asynq.ParseRedisURI(*url)))
	body, began := strings.Repeat("x", *payload), time.Now()
	options := []asynq.Option{asynq.Queue(*queue), asynq.MaxRetry(*tries)}
	if *delay > 0 {
		options = append(options, asynq.ProcessIn(time.Duration(*delay*1e9)))
	}
	for n := range *jobs {
		if *rate > 0 {
			time.Sleep(time.Until(began.Add(time.Duration(float64(n) / *rate * 1e9))))
		}
		data := must(json.Marshal(job{int64(*first + n), time.Now().UnixNano(), *kind, body}))
		must(client.Enqueue(asynq.NewTask("job", data), options...))
	}
	fmt.Printf("{\"seconds\": %g}\n", time.Since(began).Seconds())
}

func main() {
	flags.Parse(os.Args[2:])
	if os.Args[1] == "worker" {
		work()
	} else {
		enqueue()
	}
}
