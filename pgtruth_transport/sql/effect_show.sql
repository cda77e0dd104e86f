-- Called by: effects.book.history, for the command line: everything that happened to one effect.
-- Locks: nothing.
-- Index: effect_history_key.
SELECT at, calls, from_state, to_state, who, why, fingerprint, fence
FROM {schema}.effect_history
WHERE key = %(key)s
ORDER BY id
