// Package socket reads and writes the socket of a connection of package net at lower cost. It makes
// raw system calls, because they cannot block here. The usual calls tell Go's scheduler, which then
// wakes the thread that looks for blocked calls. Deadlines and Close of the connection still work.
package socket
