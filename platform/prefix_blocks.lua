-- Takes news of the blocks that a tenant has on one replica. They must follow on what was told
-- last, or else be the whole; news that come late, after newer ones, change nothing.
--
-- KEYS[1]  prefix of the tenant's keys
-- ARGV     replica, life, number of this telling, of the one before, 1 if this is the whole,
--          ms to keep it, how many blocks were added, those, and then those that were removed
-- returns  1, or 0 if the whole has to be told

local blocks, last = KEYS[1] .. ':blocks:' .. ARGV[1], KEYS[1] .. ':last:' .. ARGV[1]
local life, number, previous = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local whole, keep, added = ARGV[5] == '1', ARGV[6], tonumber(ARGV[7])

local known = redis.call('HMGET', last, 'life', 'number')
local told = known[1] == life and tonumber(known[2])
if told and told >= number then
  return 1
end
if not whole and told ~= previous then
  return 0
end
if whole then
  redis.call('DEL', blocks)
end
if added > 0 then
  redis.call('SADD', blocks, unpack(ARGV, 8, 7 + added))
end
if #ARGV > 7 + added then
  redis.call('SREM', blocks, unpack(ARGV, 8 + added, #ARGV))
end
redis.call('HSET', last, 'life', life, 'number', number)
redis.call('PEXPIRE', last, keep)
redis.call('PEXPIRE', blocks, keep)
return 1
