-- Adds to a tenant's totals, once for each number: a client that lost the answer asks again.
--
-- KEYS[1]  prefix of the tenant's keys
-- ARGV     worker, number, ms to remember it, ms to keep totals that nobody adds to, then names
--          and amounts

local counted, totals = KEYS[1] .. ':counted:' .. ARGV[1], KEYS[1] .. ':totals'
if tonumber(redis.call('GET', counted) or 0) >= tonumber(ARGV[2]) then
  return
end
redis.call('SET', counted, ARGV[2], 'PX', ARGV[3])
redis.call('HSETNX', totals, 'since', redis.call('TIME')[1])
for i = 5, #ARGV, 2 do
  redis.call('HINCRBY', totals, ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', totals, ARGV[4])
