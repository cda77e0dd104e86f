-- Called by: observe.queries.looking, first in every transaction that only looks; the settings end with it.
-- Locks: nothing.
-- Index: none. Makes the planner walk indexes in order and stop at the limit, whatever its statistics say of the tables.
SELECT
    set_config('transaction_read_only', 'on', true),
    set_config('statement_timeout', %(timeout_ms)s::text, true),
    set_config('enable_bitmapscan', 'off', true),
    set_config('enable_seqscan', 'off', true),
    set_config('jit', 'off', true)
