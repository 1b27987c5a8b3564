module schedulers

go 1.24

require (
	github.com/lib/pq v1.12.3
	github.com/robfig/cron/v3 v3.0.1
)
