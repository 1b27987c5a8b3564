"""The atomic steps of the Redis Streams bus, which neither a crash nor another member may tear apart.

Promise: a script happens as a whole or not at all, and running one of them twice (its reply was lost) does no
harm: a second publish of an id, a second quarantine or release of an entry changes nothing.

When it does NOT hold: Redis Cluster. Keys are built inside the scripts, so all must live on one primary.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.client import NEVER_DECODE
from redis.exceptions import NoScriptError

__all__ = [
    "AGAIN",
    "FORGET",
    "GAP",
    "HOLD",
    "LEASE",
    "PUBLISH",
    "QUARANTINE",
    "RELEASE",
    "REPLAY",
    "SUBSCRIBE",
    "TAKE",
    "TRIM",
    "Script",
    "raw",
]


async def raw(redis: Redis, *command: Any) -> Any:
    """Bytes, whatever the client's setting: one body that is not UTF-8 made a decoding client fail the whole
    batch, and again at every later read."""
    execute: Any = redis.execute_command
    return await execute(*command, **{NEVER_DECODE: True})


class Script:
    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode()).hexdigest()

    async def __call__(self, redis: Redis, keys: Sequence[str], args: Sequence[Any]) -> Any:
        try:
            return await raw(redis, "EVALSHA", self.sha, len(keys), *keys, *args)
        except NoScriptError:  # first use, or Redis restarted
            return await raw(redis, "EVAL", self.source, len(keys), *keys, *args)


# From 0, not $: a group that starts late must not lose what was published before it. With a count of its own: without
# one, Redis takes what a group that never read has missed for nothing.
SUBSCRIBE = Script("""
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if made['err'] then
  if string.find(made['err'], 'BUSYGROUP', 1, true) then return 0 end
  return made
end
local info, stream = redis.call('XINFO', 'STREAM', KEYS[1]), {}
for i = 1, #info, 2 do stream[info[i]] = info[i + 1] end
local added = stream['entries-added']
if added then redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], '0', 'ENTRIESREAD', added - stream['length']) end
return 1""")
PUBLISH = Script("""
local window = tonumber(ARGV[1])
for i = 2, #ARGV, 3 do
  local seen = KEYS[1] .. ':seen:' .. ARGV[i]
  if window == 0 or redis.call('EXISTS', seen) == 0 then
    redis.call('XADD', KEYS[1], '*', 'event', ARGV[i + 1], 'key', ARGV[i + 2])
    -- After it: marked first, an event whose XADD fails would be dropped as a repeat forever.
    if window > 0 then redis.call('SET', seen, 1, 'PX', window) end
  end
end
return 1""")
# What some group has yet to read or acknowledge stays, and all that came after it; MAXLEN would drop it.
TRIM = Script("""
local function split(id) local a, b = string.match(id, '(%d+)-(%d+)'); return tonumber(a), tonumber(b) end
local now = redis.call('TIME')
local ms, seq = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000) - tonumber(ARGV[1]), 0
local function keep(a, b) if a < ms or (a == ms and b < seq) then ms, seq = a, b end end
local groups = redis.call('XINFO', 'GROUPS', KEYS[1])
if #groups == 0 then return 0 end
for _, flat in ipairs(groups) do
  local group = {}
  for i = 1, #flat, 2 do group[flat[i]] = flat[i + 1] end
  local a, b = split(group['last-delivered-id'])
  keep(a, b + 1)
  if group['pending'] > 0 then keep(split(redis.call('XPENDING', KEYS[1], group['name'])[2])) end
end
return redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f-%.0f', ms, seq))""")
# How many entries somebody else trimmed away before the group had read them, reported once. They show while nothing
# older is left, and after the group has read everything: Redis then still counts them as its lag, until corrected.
GAP = Script("""
local function named(flat) local t = {}; for i = 1, #flat, 2 do t[flat[i]] = flat[i + 1] end; return t end
local function split(id) local a, b = string.match(id, '(%d+)-(%d+)'); return tonumber(a), tonumber(b) end
local function before(x, y) local a, b = split(x); local c, d = split(y); return a < c or (a == c and b < d) end
local stream = named(redis.call('XINFO', 'STREAM', KEYS[1]))
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = named(flat)
  local read, unread = group['last-delivered-id'], nil
  if group['name'] == ARGV[1] and group['lag'] then
    if read == stream['last-generated-id'] then unread = 0
    elseif not stream['first-entry'] or before(read, stream['first-entry'][1]) then unread = stream['length'] end
    if unread and group['lag'] > unread then
      redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], read, 'ENTRIESREAD', stream['entries-added'] - unread)
      return group['lag'] - unread
    end
  end
end
return 0""")
REPLAY = Script("""
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not entry then return 0 end
local field = {}
for i = 1, #entry[2], 2 do field[entry[2][i]] = entry[2][i + 1] end
redis.call('XADD', KEYS[2], '*', 'event', field['event'], 'key', field['key'])
return redis.call('XDEL', KEYS[1], ARGV[1])""")
# Other members' entries that have been idle long enough: now ours. A delivery counts only when it starts to run
# (AGAIN), or a crash would be charged to everything the dead process held. Also returns the entries that somebody
# trimmed away: this call drops them from the pending list, and nobody else learns of them.
TAKE = Script("""
local found = {}
local claimed = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
for _, id in ipairs(claimed[2]) do
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  if entry then table.insert(found, entry) end
end
return {claimed[1], found, claimed[3] or {}}""")
# An entry of ours again; ARGV[4]: does that count as a delivery? False if it is no longer ours, an empty list if
# somebody trimmed it away: then it is no longer pending either.
AGAIN = Script("""
local known = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not known or known[2] ~= ARGV[2] then return false end
local entry = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1]
if not entry then redis.call('XACK', KEYS[1], ARGV[1], ARGV[3]); return {} end
if ARGV[4] == '0' then redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'JUSTID')
else redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3]) end
known = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)[1]
if not known then return false end
return {known[4], entry[2]}""")
# Still running these: their idle time starts again. ARGV[3] other than 0 releases them that many ms old.
HOLD = Script("""
for i = 4, #ARGV do
  local known = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if known and known[2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID')
  end
end
return 1""")
QUARANTINE = Script("""
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 1 then
  redis.call('XADD', KEYS[2], '*', 'event', ARGV[3], 'key', ARGV[4], 'reason', ARGV[5], 'deliveries', ARGV[6])
end
return 1""")
# Names of processes that are gone and hold nothing. DELCONSUMER drops pending entries, hence inside a script.
FORGET = Script("""
for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local member = {}
  for i = 1, #flat, 2 do member[flat[i]] = flat[i + 1] end
  if member['pending'] == 0 and (member['name'] == ARGV[2] or member['idle'] > tonumber(ARGV[3])) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], member['name'])
  end
end
return 1""")
# Order: one owner per stream, streams shared out evenly among the members seen within a lease.
LEASE = Script("""
local now, ttl, held = redis.call('TIME'), tonumber(ARGV[2]), {}
local ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
-- First, also because it takes no memory: a full Redis refuses a script that begins with a write that does.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ms - ttl)
redis.call('ZADD', KEYS[1], ms, ARGV[1])
local fair = math.ceil((#KEYS - 1) / redis.call('ZCARD', KEYS[1]))
for i = 2, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    redis.call('PEXPIRE', KEYS[i], ttl); table.insert(held, i - 2)
  end
end
for i = 2, #KEYS do
  if #held < fair and redis.call('SET', KEYS[i], ARGV[1], 'NX', 'PX', ttl) then table.insert(held, i - 2) end
end
return {fair, held}""")
RELEASE = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0""")
