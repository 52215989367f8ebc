package group

import "sync"

// mailbox is an unbounded queue to one owner. post never blocks, so a
// connection cannot hold up the step clock nor the clock a connection.
type mailbox[T any] struct {
	mu   sync.Mutex
	mail []T
	wake chan struct{} // has a token when mail may not be empty
}

func newMailbox[T any]() *mailbox[T] { return &mailbox[T]{wake: make(chan struct{}, 1)} }

func (m *mailbox[T]) post(v T) {
	m.mu.Lock()
	m.mail = append(m.mail, v)
	m.mu.Unlock()
	nudge(m.wake)
}

// swap swaps the mail for the empty slice given.
func (m *mailbox[T]) swap(empty []T) []T {
	m.mu.Lock()
	defer m.mu.Unlock()
	mail := m.mail
	m.mail = empty[:0]
	return mail
}

func nudge(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}
