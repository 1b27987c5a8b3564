/**
 * `once` and `announce` of inbox.ts on SQLite: better-sqlite3, or node:sqlite from Node 22 on.
 *
 * Effects are plain functions: an `await` inside would let the statements of another job into the open transaction.
 */
import type { JobsOptions, Queue } from 'bullmq';
import { fingerprint, KeyReused } from './inbox.js';

export interface Sqlite {
  exec(statement: string): unknown;
  prepare(statement: string): { run(...values: any[]): { changes: number | bigint }; get(...values: any[]): any; all(...values: any[]): any[] };
}

export const SQLITE_TABLES = `
  CREATE TABLE IF NOT EXISTS inbox (consumer TEXT, key TEXT, fingerprint TEXT NOT NULL, result TEXT, PRIMARY KEY (consumer, key));
  CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY, queue TEXT NOT NULL, name TEXT NOT NULL, key TEXT NOT NULL, data TEXT NOT NULL);`;

export function transactionSync<T>(db: Sqlite, work: () => T): T {
  // With a plain BEGIN, a transaction that reads, then writes, fails if another process wrote in between.
  db.exec('BEGIN IMMEDIATE');
  try {
    const result = work();
    db.exec('COMMIT');
    return result;
  } catch (error) {
    db.exec('ROLLBACK');
    throw error;
  }
}

// [sqlite]
export function onceSync<T>(db: Sqlite, consumer: string, key: string, payload: unknown, effect: () => T): T {
  return transactionSync(db, () => {
    const mark = fingerprint(payload);
    const claim = 'INSERT INTO inbox (consumer, key, fingerprint) VALUES (?, ?, ?) ON CONFLICT DO NOTHING';
    if (Number(db.prepare(claim).run(consumer, key, mark).changes) === 1) {
      const result = effect();
      const text = JSON.stringify(result ?? null);
      db.prepare('UPDATE inbox SET result = ? WHERE consumer = ? AND key = ?').run(text, consumer, key);
      return result;
    }
    const row = db.prepare('SELECT fingerprint, result FROM inbox WHERE consumer = ? AND key = ?').get(consumer, key);
    if (row.fingerprint !== mark) throw new KeyReused(`${key} was used for another payload`);
    return JSON.parse(row.result) as T;
  });
}
// [/sqlite]

export function announceSync(db: Sqlite, queue: string, name: string, key: string, data: unknown): void {
  db.prepare('INSERT INTO outbox (queue, name, key, data) VALUES (?, ?, ?, ?)').run(queue, name, key, JSON.stringify(data));
}

/** No transaction is open while Redis is called: what two processes add at once is one job, by its id. */
export async function relaySync(db: Sqlite, queues: Record<string, Queue>, options: JobsOptions): Promise<number> {
  const rows = db.prepare('SELECT * FROM outbox ORDER BY id LIMIT 100').all();
  for (const row of rows) {
    await queues[row.queue]?.add(row.name, JSON.parse(row.data), { ...options, jobId: row.key });
    db.prepare('DELETE FROM outbox WHERE id = ?').run(row.id);
  }
  return rows.length;
}
