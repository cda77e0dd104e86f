-- The demo's final table: effects that may or may not have happened.
-- Locks nothing.
-- Reads the whole table, which is small here.
SELECT count(*) FROM pgtruth.effects WHERE state = 'unknown';
