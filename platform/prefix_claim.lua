-- Says that a worker tells of a replica's cache, and for how long it is to be believed. One worker
-- at a time does: another one of the same engine life must wait until the lease has ended.
--
-- KEYS[1]  prefix of the replicas' keys
-- ARGV     replica, worker, life (all that was told in another one is void), the engine's epoch,
--          1 if nothing was lost, lease µs, ms to remember a replica
-- returns  0: another worker's turn, 1: done, 2: done, and this life was not known

local leases, replica = KEYS[1] .. ':leases', KEYS[1] .. ':replica:' .. ARGV[1]
local worker, life, epoch, complete = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
local known = redis.call('HMGET', replica, 'worker', 'life', 'epoch', 'complete')
if known[3] == epoch then
  if known[1] ~= worker and redis.call('ZSCORE', leases, ARGV[1]) then
    return 0
  end
  if known[1] ~= worker or known[4] == '0' then
    complete = '0' -- a successor may have missed what its predecessor heard
  end
end
redis.call('HSET', replica, 'worker', worker, 'life', life, 'epoch', epoch, 'complete', complete)
redis.call('ZADD', leases, now + tonumber(ARGV[6]), ARGV[1])
redis.call('PEXPIRE', replica, ARGV[7])
redis.call('PEXPIRE', leases, ARGV[7])
return known[2] == life and 1 or 2
