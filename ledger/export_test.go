package ledger

// EncodeHistory is what a history's file holds.
var EncodeHistory = encodeHistory
