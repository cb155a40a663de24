-- Lets one request of a tenant in, or says why not: a concurrency lease, a GCRA cell and a
-- reservation of tokens, all of them or none. Nothing is written when one fails.
-- The same id admitted twice (a client that lost the answer asks again) is charged once.
--
-- KEYS[1]  prefix of the tenant's keys, with its hash tag: all derived keys share one slot
-- ARGV     id, period µs, lease µs, then the limits (-1: none): at once, requests, tokens a period;
--          tokens to reserve
-- returns  {refused by (0: nothing, 1: at once, 2: requests, 3: tokens), µs to wait, window,
--           requests left, µs until all are, tokens left, µs until all are, running}

local AT_ONCE_WAIT = 1000000 -- nobody knows when a running request ends

local prefix, id = KEYS[1], ARGV[1]
local period, lease = tonumber(ARGV[2]), tonumber(ARGV[3])
local max_running, max_requests, max_tokens = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local estimate = tonumber(ARGV[7])

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local window = math.floor(now / period)
local window_end = (window + 1) * period

local leases, cell = prefix .. ':leases', prefix .. ':requests'
local counter = prefix .. ':tokens:' .. string.format('%.0f', window)
local reservation = prefix .. ':reserved:' .. id

local running = redis.call('ZCOUNT', leases, string.format('(%.0f', now), '+inf')
local used = tonumber(redis.call('GET', counter) or 0)
local arrival = math.max(tonumber(redis.call('GET', cell) or 0), now) -- GCRA's theoretical one
local step = max_requests > 0 and math.ceil(period / max_requests) or 0
local burst = step * max_requests

local function answer(refused_by, wait)
  local requests = step > 0 and math.max(0, math.floor((burst - (arrival - now)) / step)) or -1
  local tokens = max_tokens >= 0 and math.max(0, max_tokens - used) or -1
  return {refused_by, wait, window, requests, arrival - now, tokens, window_end - now, running}
end

if redis.call('EXISTS', reservation) == 1 then
  return answer(0, 0)
end

local refused_by, wait = 0, 0
local function refuse(reason, longer)
  if longer > wait then
    refused_by, wait = reason, longer
  end
end
if max_running >= 0 and running >= max_running then
  refuse(1, AT_ONCE_WAIT)
end
if step > 0 then
  refuse(2, arrival + step - burst - now)
end
if max_tokens >= 0 and used + estimate > max_tokens then
  refuse(3, window_end - now)
end
if refused_by > 0 then
  return answer(refused_by, wait)
end

redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
redis.call('ZADD', leases, now + lease, id)
redis.call('PEXPIRE', leases, math.ceil(lease / 1000))
running = running + 1
if step > 0 then
  arrival = arrival + step
  redis.call('SET', cell, arrival, 'PX', math.ceil((arrival - now) / 1000))
end
used = redis.call('INCRBY', counter, estimate)
redis.call('SET', reservation, estimate)
for _, key in ipairs({counter, reservation}) do -- a late settlement still finds both
  redis.call('PEXPIREAT', key, math.ceil((window_end + period) / 1000))
end
return answer(0, 0)
