// Package heldport keeps a port while nobody listens on it.
package heldport

import (
	"fmt"
	"net"
	"os"
	"syscall"
)

// Reserve has the kernel choose a port of an address and keeps it until the
// file is closed. One can listen there all the while; while nobody does,
// connections are refused, and the kernel gives the port to nobody else. The
// port of an IPv6 address is left to the listener.
func Reserve(addr string) (string, *os.File, error) {
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return "", nil, err
	}
	if a.IP != nil && a.IP.To4() == nil {
		return addr, nil, nil
	}
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, os.NewSyscallError("socket", err)
	}
	held := os.NewFile(uintptr(fd), "port of "+addr)
	at := &syscall.SockaddrInet4{}
	copy(at.Addr[:], a.IP.To4())
	// With the same option a listener, which net.Listen gives it, may have the
	// address, too, for this socket never listens.
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		_ = held.Close()
		return "", nil, os.NewSyscallError("setsockopt", err)
	}
	if err := syscall.Bind(fd, at); err != nil {
		_ = held.Close()
		return "", nil, os.NewSyscallError("bind", err)
	}
	got, err := syscall.Getsockname(fd)
	if err != nil {
		_ = held.Close()
		return "", nil, os.NewSyscallError("getsockname", err)
	}
	host, _, _ := net.SplitHostPort(addr) // it was resolved
	return net.JoinHostPort(host, fmt.Sprint(got.(*syscall.SockaddrInet4).Port)), held, nil
}
