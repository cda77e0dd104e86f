-- Called by: transport.messages.requeue, by the holder of these messages: back to their places.
-- Locks: the messages; those that somebody else holds by now are left alone.
-- Index: messages_pkey.
UPDATE {schema}.messages
SET owned_by = NULL, lease_expires_at = NULL, redelivered = true
WHERE id = ANY(%(ids)s::bigint[]) AND owned_by = %(owner)s
