-- Keeps a request's leases and notes what it has generated; a lease that ended, and whose place
-- another request took, stays gone, and so does all of a request that was settled.
--
-- KEYS     prefix of the tenant's keys; the index of all open requests
-- ARGV     id, lease, tokens generated so far
-- returns  1 if all its leases are kept, else 0

local id, lease = ARGV[1], tonumber(ARGV[2])
local record = record_of(id)
local buckets = redis.call('HGET', record, 'buckets')
if not buckets then
  return 0
end
redis.call('HSET', record, 'heard', ARGV[3])
redis.call('PEXPIRE', record, RECORD_KEPT)
redis.call('ZADD', KEYS[2], now + lease, member_of(id))
local kept = 1
for bucket in string.gmatch(buckets, '%S+') do
  local leases = KEYS[1] .. ':' .. bucket .. ':leases'
  if redis.call('ZSCORE', leases, id) then
    redis.call('ZADD', leases, now + lease, id)
    redis.call('PEXPIRE', leases, math.ceil(lease / 1000))
  else
    kept = 0
  end
end
return kept
