package suspect

import (
	"errors"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
)

// Blame is a 500 whose cause is open: old vLLM answers so to prompts that are
// too long, and every engine would.
type Blame struct {
	instance string
	settle   func(Finding) // nil: nobody is accused
	cleared  bool          // two engines said it: it is the request
}

// Finding is whose a 500 was.
type Finding uint8

// The findings.
const (
	Unclear  Finding = iota // no other engine had the request
	Guilty                  // another engine answered it
	Innocent                // another engine failed at it, too
)

// Accuse holds a 500 against a decode engine, unless another gives it too. KV that did not arrive
// is held against it at once.
func (b *Blame) Accuse(monitor *engine.Monitor, instance string, err error) {
	if errors.Is(err, failure.ErrUndelivered) {
		monitor.Judge(instance, engine.Faulted, err)
		return
	}
	settle := monitor.Accuse(instance)
	b.Hold(instance, func(f Finding) {
		settle()
		switch f {
		case Guilty:
			monitor.Judge(instance, engine.Faulted, err)
		case Unclear:
			monitor.Judge(instance, engine.Unclear, err)
		case Innocent:
		}
	})
}

// Hold keeps the verdict on a 500 until it is known whose it is.
func (b *Blame) Hold(instance string, settle func(Finding)) {
	switch {
	case b.cleared:
		settle(Innocent)
	case b.settle == nil:
		b.instance, b.settle = instance, settle
	case b.instance != instance:
		b.settle(Innocent)
		settle(Innocent)
		b.settle, b.cleared = nil, true
	default: // it said so before
		first := b.settle
		b.settle = func(f Finding) { first(f); settle(f) }
	}
}

// Find settles a 500 that no other engine confirmed.
func (b *Blame) Find(f Finding) {
	if settle := b.settle; settle != nil {
		b.settle = nil
		settle(f)
	}
}
