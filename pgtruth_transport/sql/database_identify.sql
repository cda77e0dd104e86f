-- Called by: transactions.identity, once per connection that in_transaction is given, and once for the broker's own.
-- Locks: nothing. No two running servers share a start time, and within one a database's name is unique.
-- Index: none. It reads no table, so that it needs no privilege: an error here would spoil the application's transaction.
SELECT current_database()::text, extract(epoch FROM pg_postmaster_start_time())::text
