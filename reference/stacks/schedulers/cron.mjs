import cron from "node-cron";
import pg from "pg";

const pool = new pg.Pool({ connectionString: process.env.STORE, max: 2 });
const PERIOD = Number(process.env.PERIOD ?? 86400);

async function tick() {
  const slot = Math.floor(Date.now() / 1000 / PERIOD);
  const db = await pool.connect();
  try {
    await db.query("BEGIN");
    const row = await db.query(
      "INSERT INTO slots (schedule, slot) VALUES ('manifest', $1) ON CONFLICT DO NOTHING", [slot]);
    if (row.rowCount === 1) await db.query("INSERT INTO jobs (slot) VALUES ($1)", [slot]);
    await db.query("COMMIT");
  } catch (error) {
    await db.query("ROLLBACK").catch(() => {});
    console.error(error.message);
  } finally {
    db.release();
  }
}

cron.schedule("* * * * * *", tick, { noOverlap: true });
