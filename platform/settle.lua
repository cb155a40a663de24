-- Ends a request: its leases, and the difference between the tokens reserved and those used, put to
-- the windows that they were reserved in, as far as those still count. A second settlement changes
-- nothing.
--
-- With a note, the record stays in the index, to be found if the server dies before the ledger has
-- the request; without one it goes. A sweep is the settlement of a request whose server is gone, and
-- only if nothing was heard of it for a whole lease. Its record stays for a while, so that a server
-- that was slow and not dead still puts its own number right.
--
-- KEYS     prefix of the tenant's keys; the index of all open requests
-- ARGV     id, tokens used, 1 for a sweep, lease, a note for who finds the request (empty: none)
-- returns  1 if it was charged, else 0

local id, used, sweep = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1'
local lease, note = tonumber(ARGV[4]), ARGV[5]
local record, member = record_of(id), member_of(id)

if sweep then
  local ends = redis.call('ZSCORE', KEYS[2], member)
  if not ends or tonumber(ends) > now then
    return 0
  end
end
local kept = redis.call('HMGET', record, 'amount', 'buckets', 'windows')
if not kept[1] then
  redis.call('ZREM', KEYS[2], member)
  return 0
end
local counters = {}
for bucket in string.gmatch(kept[2], '%S+') do
  redis.call('ZREM', KEYS[1] .. ':' .. bucket .. ':leases', id)
  for window in string.gmatch(kept[3], '%S+') do
    counters[#counters + 1] = KEYS[1] .. ':' .. bucket .. ':' .. window
  end
end
local difference = whole(used - kept[1])
if difference ~= '0' then
  for i, count in ipairs(redis.call('MGET', unpack(counters))) do
    if count then
      redis.call('INCRBY', counters[i], difference)
    end
  end
end
if note ~= '' then
  redis.call('HSET', record, 'amount', ARGV[2], 'note', note)
  redis.call('PEXPIRE', record, RECORD_KEPT)
  redis.call('ZADD', KEYS[2], whole(now + lease), member)
  return 1
end
redis.call('ZREM', KEYS[2], member)
if sweep then
  redis.call('HSET', record, 'amount', used)
  redis.call('PEXPIRE', record, SWEPT_KEPT)
else
  redis.call('DEL', record)
end
return 1
