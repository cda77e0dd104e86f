-- Called by: beat, first thing in a tick's transaction: a beat that is frozen in it holds its entry for ten seconds at most.
-- Locks: nothing. The settings end with the transaction, so that a transaction pooler may stand in between.
-- Index: none.
SELECT set_config('idle_in_transaction_session_timeout', '10s', true), set_config('lock_timeout', '15s', true)
