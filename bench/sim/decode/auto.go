package decode

import (
	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/twin"
)

// auto is a run whose policy the twin chooses, as in the server. Its replays take no virtual time.
type auto struct {
	tape    twin.Tape
	judge   *twin.Twin
	chooser *twin.Chooser
	changes int
}

// chooses has the twin choose the policy of the run.
func (r *run) chooses(specs []string) {
	r.auto = &auto{judge: twin.New(specs, specs...), chooser: twin.NewChooser(specs)}
	r.OnEvent, r.OnEffect = r.auto.tape.Record, r.auto.tape.Done
}

// judge has the twin judge if it is time, and changes the policy if it says so.
func (r *run) judge() {
	a, now := r.auto, r.Instant(r.Now)
	if !a.tape.Due(now, twin.Every(r.Boards.Held())) {
		return
	}
	r.Count(r.Now)
	copied := r.Boards.Clone()
	s := a.tape.Cut(now, copied)
	if s == nil {
		return
	}
	a.judge.AddStretch(s, copied)
	for more := true; more; {
		var fresh []twin.Verdict
		fresh, more = a.judge.Work(1 << 20)
		if choice, change := a.chooser.Consider(fresh, now); change {
			a.changes++
			r.Apply(board.SetPolicy{Spec: choice.Spec}, r.Now)
		}
	}
}
