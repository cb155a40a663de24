-- Keeps a request's lease; one that was settled, or whose place another request took, stays gone.
--
-- KEYS[1]  prefix of the tenant's keys
-- ARGV     id, lease µs
-- returns  1 if the lease is kept, else 0

local leases, id, lease = KEYS[1] .. ':leases', ARGV[1], tonumber(ARGV[2])
if not redis.call('ZSCORE', leases, id) then
  return 0
end
local time = redis.call('TIME')
redis.call('ZADD', leases, time[1] * 1000000 + time[2] + lease, id)
redis.call('PEXPIRE', leases, math.ceil(lease / 1000))
return 1
