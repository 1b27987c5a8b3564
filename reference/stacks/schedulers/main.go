package main

import (
	"database/sql"
	"log"
	"os"
	"strconv"
	"time"

	_ "github.com/lib/pq"
	"github.com/robfig/cron/v3"
)

func tick(db *sql.DB, period int64) error {
	slot := time.Now().Unix() / period
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback()
	row, err := tx.Exec("INSERT INTO slots (schedule, slot) VALUES ('manifest', $1) ON CONFLICT DO NOTHING", slot)
	if err != nil {
		return err
	}
	if n, _ := row.RowsAffected(); n == 1 {
		if _, err := tx.Exec("INSERT INTO jobs (slot) VALUES ($1)", slot); err != nil {
			return err
		}
	}
	return tx.Commit()
}

func main() {
	period, err := strconv.ParseInt(os.Getenv("PERIOD"), 10, 64)
	if err != nil {
		log.Fatal("PERIOD: seconds from one slot to the next")
	}
	db, err := sql.Open("postgres", os.Getenv("STORE"))
	if err != nil {
		log.Fatal(err)
	}
	// Recover: without it a panic in a job ends the process.
	clock := cron.New(cron.WithSeconds(), cron.WithChain(cron.Recover(cron.DefaultLogger), cron.SkipIfStillRunning(cron.DefaultLogger)))
	if _, err := clock.AddFunc("* * * * * *", func() {
		if err := tick(db, period); err != nil {
			log.Print(err)
		}
	}); err != nil {
		log.Fatal(err)
	}
	clock.Run()
}
