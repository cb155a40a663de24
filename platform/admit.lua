-- Lets one request of a tenant in, or says why not: in each bucket a concurrency lease, a GCRA cell
-- and a reservation of tokens in its minute, day and month, all of them or none. Of a request that
-- is refused nothing is written but a line in the list of the tenant's refusals.
-- The same id admitted twice (a client that lost the answer asks again) is charged once.
--
-- Redis may have lost its data. So what a budget has used is what was counted here, since a moment
-- that is noted, and what the ledger says of requests before it, in that moment's month. As long as
-- the ledger was not read, nothing is decided for who has a budget.
--
-- KEYS     prefix of the tenant's keys, with its hash tag; the index of all open requests
-- ARGV     id, period, lease, tokens to reserve, 1 to decide and write nothing else, a note for who
--          finds the request abandoned, who needs the ledger (0: nobody, 1: budgets, 2: all); then
--          for each bucket its name and its limits (-1: none):
--          requests and tokens a period, at once, tokens a day, tokens a month
-- returns  {-1, moment before which the ledger is to be read first}, or
--          {bucket and limit that refuse (1.. each, in the order of ARGV; 0: none), wait, now,
--           ends of minute, day and month, moment before which the ledger is to be read again (0:
--           not yet), then for each bucket:
--           requests left, time until all are, tokens used of minute, day and month, running}

local AT_ONCE_WAIT = 1000000 -- nobody knows when a running request ends
local REFUSALS = 100
local REFUSALS_KEPT = 7 * DAY / 1000
local SINCE_KEPT = 40 * DAY / 1000 -- longer than any counter

local id, period, lease, estimate = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local dry, note, ledger = ARGV[5] == '1', ARGV[6], tonumber(ARGV[7])
local record, window, ends = record_of(id), windows(period)
local now_text = whole(now)

local function look(at)
  local b = {key = KEYS[1] .. ':' .. ARGV[at], name = ARGV[at], limits = {}, used = {}}
  for i = 1, 5 do
    b.limits[i] = tonumber(ARGV[at + i])
  end
  b.budgets = {b.limits[2], b.limits[4], b.limits[5]}
  b.before = {0, 0, 0}
  b.step = b.limits[1] > 0 and math.ceil(period / b.limits[1]) or 0
  b.arrival = now
  if b.step > 0 then
    b.arrival = math.max(tonumber(redis.call('GET', b.key .. ':requests') or 0), now)
  end
  for i, name in ipairs(window) do
    local read = dry or b.budgets[i] >= 0
    b.used[i] = read and tonumber(redis.call('GET', b.key .. ':' .. name) or 0) or 0
  end
  local count = dry or b.limits[3] >= 0
  b.running = count and redis.call('ZCOUNT', b.key .. ':leases', '(' .. now_text, '+inf') or 0
  return b
end

local buckets, asks_ledger = {}, ledger == 2
for at = 8, #ARGV, 6 do
  local b = look(at)
  buckets[#buckets + 1] = b
  asks_ledger = asks_ledger or (ledger == 1 and math.max(b.budgets[2], b.budgets[3]) >= 0)
end

-- When this tenant's requests began to be counted. Where this month's are counted, and nobody knows
-- since when, a version did it that kept no such moment: 0, always.
local function counted_since()
  local since = redis.call('GET', KEYS[1] .. ':since')
  if not since then
    since = redis.call('EXISTS', KEYS[1] .. ':tenant:' .. window[3]) == 1 and 0 or now
    redis.call('SET', KEYS[1] .. ':since', since, 'PX', SINCE_KEPT)
  end
  return tonumber(since)
end

-- Adds what the ledger says of earlier requests; when to read it again, false if it never was.
local function add_ledger()
  local fields = {'again'}
  for _, b in ipairs(buckets) do
    fields[#fields + 1] = b.name .. ':' .. window[2]
    fields[#fields + 1] = b.name .. ':' .. window[3]
  end
  local told = redis.call('HMGET', KEYS[1] .. ':ledger', unpack(fields))
  for i, b in ipairs(buckets) do
    for w = 2, 3 do
      b.before[w] = tonumber(told[2 * i + w - 2] or 0)
      b.used[w] = b.used[w] + b.before[w]
    end
  end
  return told[1] and tonumber(told[1])
end

local since, read_again = ledger > 0 and counted_since() or 0, 0
if asks_ledger and dates(since)[2] == window[3] then
  local again = add_ledger()
  if not again then
    return {-1, since}
  end
  read_again = again <= now and since or 0
end

local refused_by, limit, wait, spent = 0, 0, 0, false

local function refuse(bucket, which, longer)
  local budget = which >= 4
  if (budget and not spent) or (budget == spent and longer > wait) then
    refused_by, limit, wait, spent = bucket, which, longer, budget
  end
end

local function answer()
  local told = {refused_by, limit, wait, now, ends[1], ends[2], ends[3], read_again}
  for _, b in ipairs(buckets) do
    local burst = b.step * b.limits[1]
    local left = b.step > 0 and math.max(0, math.floor((burst - (b.arrival - now)) / b.step)) or -1
    for _, value in ipairs({left, b.arrival - now, b.used[1], b.used[2], b.used[3], b.running}) do
      told[#told + 1] = value
    end
  end
  return told
end

if redis.call('EXISTS', record) == 1 then
  return answer()
end
for i, b in ipairs(buckets) do
  if b.step > 0 then
    refuse(i, 1, b.arrival + b.step - b.step * b.limits[1] - now)
  end
  if b.limits[3] >= 0 and b.running >= b.limits[3] then
    refuse(i, 3, AT_ONCE_WAIT)
  end
  for w, which in ipairs({2, 4, 5}) do
    if b.budgets[w] >= 0 and b.used[w] + estimate > b.budgets[w] then
      refuse(i, which, ends[w] - now)
    end
  end
end
if dry then
  return answer()
end
if refused_by > 0 then
  local refusal = {id, tonumber(time[1]), buckets[refused_by].name, limit, estimate, wait}
  redis.call('LPUSH', KEYS[1] .. ':refusals', cjson.encode(refusal))
  redis.call('LTRIM', KEYS[1] .. ':refusals', 0, REFUSALS - 1)
  redis.call('PEXPIRE', KEYS[1] .. ':refusals', REFUSALS_KEPT)
  return answer()
end

local lease_end, lease_ms = whole(now + lease), whole(math.ceil(lease / 1000))
local names = {}
for i, b in ipairs(buckets) do
  names[i] = b.name
  redis.call('ZREMRANGEBYSCORE', b.key .. ':leases', '-inf', now_text)
  redis.call('ZADD', b.key .. ':leases', lease_end, id)
  redis.call('PEXPIRE', b.key .. ':leases', lease_ms)
  b.running = b.running + 1
  if b.step > 0 then
    b.arrival = b.arrival + b.step
    local lives = whole(math.ceil((b.arrival - now) / 1000))
    redis.call('SET', b.key .. ':requests', whole(b.arrival), 'PX', lives)
  end
  for w, counter in ipairs(window) do
    local key = b.key .. ':' .. counter
    local counted = redis.call('INCRBY', key, ARGV[4])
    b.used[w] = counted + b.before[w]
    if counted == estimate then -- new; a late settlement still finds it
      redis.call('PEXPIREAT', key, math.ceil((ends[w] + (w == 1 and period or 2 * DAY)) / 1000))
      redis.call('PEXPIRE', KEYS[1] .. ':since', SINCE_KEPT)
    end
  end
end
redis.call('HSET', record, 'at', now_text, 'amount', ARGV[4], 'heard', '0', 'note', note,
  'buckets', table.concat(names, ' '), 'windows', table.concat(window, ' '))
redis.call('PEXPIRE', record, RECORD_KEPT)
redis.call('ZADD', KEYS[2], lease_end, member_of(id))
return answer()
