-- Called by: transport.messages.ack, by the holder of these messages.
-- Locks: the messages; those that somebody else holds by now are left alone.
-- Index: messages_pkey.
DELETE FROM {schema}.messages WHERE id = ANY(%(ids)s::bigint[]) AND owned_by = %(owner)s
