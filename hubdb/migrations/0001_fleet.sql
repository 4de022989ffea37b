-- The fleet: nodes, what is asked of them, what they say, and the audit log.
-- Times are Unix seconds; documents are the JSON of the types named.

CREATE TABLE meta (
    name  TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE nodes (
    id           TEXT    NOT NULL PRIMARY KEY,
    key          BLOB    NOT NULL UNIQUE,          -- ed25519 public key
    name         TEXT    NOT NULL,
    enrolled_at  INTEGER NOT NULL,
    version      INTEGER NOT NULL,                 -- protocol of the latest session, 0 = none yet
    incarnation  TEXT    NOT NULL,
    generation   INTEGER NOT NULL,                 -- of the desired state, 0 = nothing asked
    desired_id   TEXT    NOT NULL,
    policy       TEXT    NOT NULL,                 -- wire.Policy
    pools        TEXT    NOT NULL,                 -- list of strings
    state        TEXT,                             -- wire.State
    reported_at  INTEGER NOT NULL,
    vms          INTEGER NOT NULL,
    vms_omitted  INTEGER NOT NULL,
    inventory    TEXT,                             -- wire.Inventory
    last_command TEXT    NOT NULL,
    conflict     TEXT                              -- hub.Conflict
) STRICT, WITHOUT ROWID;

CREATE TABLE revoked (
    node TEXT    NOT NULL PRIMARY KEY,
    key  BLOB    NOT NULL,
    at   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE heartbeats (
    node TEXT    NOT NULL PRIMARY KEY,
    at   INTEGER NOT NULL,
    beat TEXT    NOT NULL                          -- wire.Heartbeat
) STRICT, WITHOUT ROWID;

CREATE TABLE workloads (
    node    TEXT    NOT NULL PRIMARY KEY,
    at      INTEGER NOT NULL,
    list    TEXT    NOT NULL,                      -- list of wire.Workload
    omitted INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE issued (
    node       TEXT    NOT NULL,
    id         TEXT    NOT NULL,
    generation INTEGER NOT NULL,
    policy     TEXT    NOT NULL,                   -- wire.Policy
    at         INTEGER NOT NULL,
    PRIMARY KEY (node, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE tokens (
    hash       TEXT    NOT NULL PRIMARY KEY,       -- sha256 of the token, hex
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    actor      TEXT    NOT NULL,
    spent_at   INTEGER NOT NULL,                   -- 0 = not spent
    node       TEXT    NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE commands (
    n        INTEGER PRIMARY KEY,                  -- order of issue
    id       TEXT    NOT NULL UNIQUE,
    node     TEXT    NOT NULL,
    actor    TEXT    NOT NULL,
    command  TEXT    NOT NULL,                     -- wire.Command
    outcome  TEXT    NOT NULL,                     -- '' = no ack yet
    message  TEXT    NOT NULL,
    acked_at INTEGER NOT NULL,
    settled  INTEGER NOT NULL                      -- 1 = the outcome is final
) STRICT;

CREATE INDEX commands_by_node ON commands (node, n);
CREATE INDEX commands_open ON commands (n) WHERE settled = 0;

CREATE TABLE audit (
    seq    INTEGER PRIMARY KEY,                    -- without gaps
    at     INTEGER NOT NULL,
    node   TEXT    NOT NULL,
    actor  TEXT    NOT NULL,
    event  TEXT    NOT NULL,
    detail TEXT    NOT NULL
) STRICT;

CREATE INDEX audit_by_node ON audit (node, seq);
