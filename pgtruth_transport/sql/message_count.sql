-- Called by: transport.messages.size.
-- Locks: nothing.
-- Index: messages_fetch, by its first column.
SELECT count(*)
FROM {schema}.messages
WHERE queue = %(queue)s
    AND (lease_expires_at IS NULL OR lease_expires_at < clock_timestamp())
    AND (expires_at IS NULL OR expires_at > clock_timestamp())
