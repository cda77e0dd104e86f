-- Called by: effects.ledger.note, for what moves nothing and must be on record: a conflict, a person's question.
-- Locks: nothing.
-- Index: effects_pkey.
INSERT INTO {schema}.effect_history (key, calls, from_state, to_state, who, why, fingerprint, fence)
SELECT key, calls, state, state, %(who)s, %(why)s, COALESCE(%(fingerprint)s::text, fingerprint), fence
FROM {schema}.effects WHERE key = %(key)s
