-- Notes what the ledger says of a tenant's requests before they were counted here, in the day and
-- the month of that moment, and when to read it again: after as long as it has been counted by then,
-- because rows of requests that ran at that moment come later.
-- Nothing that is counted is touched, so it does no harm to note it again.
--
-- KEYS     prefix of the tenant's keys; the index of all open requests
-- ARGV     that moment, then for each bucket its name and the tokens used of the day and the month
-- returns  1 if it is noted, 0 where Redis has lost that moment since

local SOONEST = 5 * 1000000

local since, ledger = tonumber(ARGV[1]), KEYS[1] .. ':ledger'
if tonumber(redis.call('GET', KEYS[1] .. ':since') or -1) ~= since then
  return 0
end
local names, ends = dates(since)
redis.call('DEL', ledger)
for at = 2, #ARGV, 3 do
  for i, name in ipairs(names) do
    redis.call('HSET', ledger, ARGV[at] .. ':' .. name, ARGV[at + i])
  end
end
redis.call('HSET', ledger, 'again', now + math.max(SOONEST, now - since))
redis.call('PEXPIREAT', ledger, math.ceil((ends[2] + 2 * DAY) / 1000))
return 1
