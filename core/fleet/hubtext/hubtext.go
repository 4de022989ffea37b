// Package hubtext is how the hub's nodes and jobs are told of to people: the
// columns of their tables and the fields of their records, which vk-hub prints
// and the web UI shows. The texts hold what nodes and projects sent: whoever
// shows them makes them safe for where they go.
package hubtext
