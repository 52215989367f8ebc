// Package socket reads and writes the socket of a connection of package net. Where a call cannot block it is made
// without a word to Go's scheduler, which would otherwise wake the thread that looks for goroutines stuck in
// system calls. Deadlines and Close of the connection hold as ever.
package socket
