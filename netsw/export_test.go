package netsw

// SetMaxSockets has guests' flows share n sockets of the host.
func (s *Switch) SetMaxSockets(n int64) { s.sockets.max = n }

// UsedSockets is how many they use now.
func (s *Switch) UsedSockets() int64 { return s.sockets.used.Load() }

// Held is how many bytes are held of flows being listened to.
func (s *Switch) Held() int64 { return s.held.Load() }

// DialUDP is the socket of a guest's UDP session.
var DialUDP = dialUDP
