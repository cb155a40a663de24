-- Ends a request: its lease, and the difference between the tokens reserved and those used, put to
-- the window that they were reserved in. A second settlement finds no reservation and does nothing;
-- after the window's end there is nothing left to correct.
--
-- KEYS[1]  prefix of the tenant's keys
-- ARGV     id, window, tokens used

local prefix, id, window, used = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local counter, reservation = prefix .. ':tokens:' .. window, prefix .. ':reserved:' .. id

redis.call('ZREM', prefix .. ':leases', id)
local reserved = redis.call('GET', reservation)
if reserved then
  redis.call('DEL', reservation)
  if redis.call('EXISTS', counter) == 1 then
    redis.call('INCRBY', counter, used - reserved)
  end
end
return reserved and 1 or 0
