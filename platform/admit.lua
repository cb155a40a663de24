-- Lets one request of a tenant in, or says why not: in each bucket a concurrency lease, a GCRA cell
-- and a reservation of tokens in its minute, day and month, all of them or none. Of a request that
-- is refused nothing is written but a line in the list of the tenant's refusals.
-- The same id admitted twice (a client that lost the answer asks again) is charged once.
--
-- KEYS     prefix of the tenant's keys, with its hash tag; the index of all open requests
-- ARGV     id, period, lease, tokens to reserve, 1 to decide and write nothing, a note for who finds
--          the request abandoned; then for each bucket its name and its limits (-1: none):
--          requests and tokens a period, at once, tokens a day, tokens a month
-- returns  {bucket and limit that refuse (1.. each, in the order of ARGV; 0: none), wait, now,
--           ends of minute, day and month, then for each bucket:
--           requests left, time until all are, tokens used of minute, day and month, running}

local AT_ONCE_WAIT = 1000000 -- nobody knows when a running request ends
local REFUSALS = 100
local REFUSALS_KEPT = 7 * DAY / 1000

local id, period, lease, estimate = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local dry, note = ARGV[5] == '1', ARGV[6]
local record, window, ends = record_of(id), windows(period)

local function look(at)
  local b = {key = KEYS[1] .. ':' .. ARGV[at], name = ARGV[at], limits = {}, used = {}}
  for i = 1, 5 do
    b.limits[i] = tonumber(ARGV[at + i])
  end
  b.budgets = {b.limits[2], b.limits[4], b.limits[5]}
  b.step = b.limits[1] > 0 and math.ceil(period / b.limits[1]) or 0
  b.arrival = now
  if b.step > 0 then
    b.arrival = math.max(tonumber(redis.call('GET', b.key .. ':requests') or 0), now)
  end
  for i, name in ipairs(window) do
    local read = dry or b.budgets[i] >= 0
    b.used[i] = read and tonumber(redis.call('GET', b.key .. ':' .. name) or 0) or 0
  end
  local alive = string.format('(%.0f', now)
  local count = dry or b.limits[3] >= 0
  b.running = count and redis.call('ZCOUNT', b.key .. ':leases', alive, '+inf') or 0
  return b
end

local buckets = {}
for at = 7, #ARGV, 6 do
  buckets[#buckets + 1] = look(at)
end

local refused_by, limit, wait, spent = 0, 0, 0, false

local function refuse(bucket, which, longer)
  local budget = which >= 4
  if (budget and not spent) or (budget == spent and longer > wait) then
    refused_by, limit, wait, spent = bucket, which, longer, budget
  end
end

local function answer()
  local told = {refused_by, limit, wait, now, ends[1], ends[2], ends[3]}
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

local names = {}
for i, b in ipairs(buckets) do
  names[i] = b.name
  redis.call('ZREMRANGEBYSCORE', b.key .. ':leases', '-inf', now)
  redis.call('ZADD', b.key .. ':leases', now + lease, id)
  redis.call('PEXPIRE', b.key .. ':leases', math.ceil(lease / 1000))
  b.running = b.running + 1
  if b.step > 0 then
    b.arrival = b.arrival + b.step
    redis.call('SET', b.key .. ':requests', b.arrival, 'PX', math.ceil((b.arrival - now) / 1000))
  end
  for w, counter in ipairs(window) do
    local key = b.key .. ':' .. counter
    b.used[w] = redis.call('INCRBY', key, estimate)
    if b.used[w] == estimate then -- new; a late settlement still finds it
      redis.call('PEXPIREAT', key, math.ceil((ends[w] + (w == 1 and period or 2 * DAY)) / 1000))
    end
  end
end
redis.call('HSET', record, 'amount', estimate, 'heard', 0, 'note', note,
  'buckets', table.concat(names, ' '), 'windows', table.concat(window, ' '))
redis.call('PEXPIRE', record, RECORD_KEPT)
redis.call('ZADD', KEYS[2], now + lease, member_of(id))
return answer()
