package reliable

import (
	"database/sql"
	"errors"
	"testing"

	_ "modernc.org/sqlite"
)

func TestAKeyIsDoneOnceAndAnotherPayloadUnderItIsRefused(t *testing.T) {
	db, err := sql.Open("sqlite", t.TempDir()+"/shop.db")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	s, ctx, effects := Store{db}, t.Context(), 0
	first := message{"parcel-1", []byte(`{"grams":500}`)}
	if err := s.exec(ctx, Tables); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.once(ctx, "buy", first, func(*sql.Tx) error { effects++; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Transaction(ctx, func(tx *sql.Tx) error { return Announce(tx, "default", "buy", first.Key, 1) }); err != nil {
		t.Fatal(err)
	}
	if done, _, err := s.claim(ctx, "buy", "default", first); !done || err != nil || effects != 1 {
		t.Fatalf("done %v, %v, %d effects", done, err, effects)
	}
	var left int
	if db.QueryRow("SELECT count(*) FROM runs").Scan(&left); left != 0 {
		t.Fatal("what is done would be sent again and again")
	}
	if _, _, err := s.claim(ctx, "buy", "default", message{first.Key, []byte(`{"grams":900}`)}); !errors.Is(err, ErrKeyReused) {
		t.Fatalf("another payload under its key: %v", err)
	}
}
