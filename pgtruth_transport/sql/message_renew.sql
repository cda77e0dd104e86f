-- Called by: transport.messages.renew, by the holder of these messages, before their leases run out.
-- Locks: the messages; those that somebody else holds by now are left alone. No indexed column changes (HOT).
-- Index: messages_pkey.
UPDATE {schema}.messages
SET lease_expires_at = clock_timestamp() + %(lease)s * interval '1 second'
WHERE id = ANY(%(ids)s::bigint[]) AND owned_by = %(owner)s
RETURNING id
