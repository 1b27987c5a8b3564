// The same shop as asynq's first steps teach it: default settings, client.Enqueue after the insert.
package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"strings"
	"syscall"

	"github.com/hibiken/asynq"
	_ "modernc.org/sqlite"
)

type task struct{ Parcel, Address, Label, Flag string }

func post(url string, body any) (id string, err error) {
	text, _ := json.Marshal(body)
	answer, err := http.Post(url, "application/json", bytes.NewReader(text))
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	if answer.StatusCode >= 400 {
		return "", fmt.Errorf("HTTP %d", answer.StatusCode)
	}
	var made struct{ ID string }
	return made.ID, json.NewDecoder(answer.Body).Decode(&made)
}

func main() {
	redis, err := asynq.ParseRedisURI(os.Getenv("REDIS_URL"))
	if err != nil {
		log.Fatal(err)
	}
	// The busy timeout that other drivers have by default.
	db, _ := sql.Open("sqlite", "file:"+os.Getenv("STORE")+"?_pragma=busy_timeout(5000)")
	client := asynq.NewClient(redis)
	send := func(kind string, data task) error {
		payload, _ := json.Marshal(data)
		_, err := client.Enqueue(asynq.NewTask(kind, payload))
		return err
	}
	switch os.Args[1] {
	case "create":
		_, err = db.Exec("CREATE TABLE labels (parcel, label); CREATE TABLE mailed (parcel, label)")
	case "submit":
		flag, address := "", os.Getenv("NOTE")
		for _, word := range os.Args[2:] {
			if strings.HasPrefix(word, "--") {
				flag = word
			} else if err = send("label", task{Parcel: word, Address: address, Flag: flag}); err != nil {
				log.Fatal(err)
			}
		}
	case "worker":
		mux := asynq.NewServeMux()
		mux.HandleFunc("label", func(ctx context.Context, t *asynq.Task) error {
			var data task
			if err := json.Unmarshal(t.Payload(), &data); err != nil {
				return err
			}
			if data.Flag == "--crash" {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
			if data.Flag == "--no-address" {
				return fmt.Errorf("the parcel has no address")
			}
			label, err := post(os.Getenv("CARRIER_URL")+"/labels", map[string]string{"parcel": data.Parcel})
			if err != nil {
				return err
			}
			if _, err := db.Exec("INSERT INTO labels VALUES (?, ?)", data.Parcel, label); err != nil {
				return err
			}
			return send("mail", task{Parcel: data.Parcel, Label: label})
		})
		mux.HandleFunc("mail", func(ctx context.Context, t *asynq.Task) error {
			var data task
			if err := json.Unmarshal(t.Payload(), &data); err != nil {
				return err
			}
			if _, err := post(os.Getenv("MAILER_URL")+"/mails", map[string]string{"parcel": data.Parcel}); err != nil {
				return err
			}
			_, err := db.Exec("INSERT INTO mailed VALUES (?, ?)", data.Parcel, data.Label)
			return err
		})
		fmt.Println("ready")
		err = asynq.NewServer(redis, asynq.Config{Concurrency: 10}).Run(mux)
	}
	if err != nil {
		log.Fatal(err)
	}
}
