package board

import (
	"time"

	"evenkeel/predictor"
)

// Learner turns requests that left into the tables that predictions come from. It stands
// beside the boards, because a table takes longer to build than a tick may last: boards tell
// endings as effects, and are told tables as events.
type Learner struct{ students []*student }

// student learns one subject.
type student struct {
	Subject
	online *predictor.Online
	fresh  bool // something finished since the last tables
}

// Follow has a subject learned, from a fit if there is one. A fit that does not serve it was
// refused before, when the operator could be told: then err says why, and it is learned from nothing.
func (l *Learner) Follow(key Subject, fit *predictor.Fit) (err error) {
	s := &student{Subject: key}
	l.students = append(l.students, s)
	if err = s.start(fit); err != nil {
		s.online, _ = predictor.NewOnline(predictor.OnlineConfig{Kind: predictor.KindSurvival}) // takes anything
	}
	return err
}

// Load makes all subjects start anew from a fit. It returns those that it does not serve,
// which stay as they were.
func (l *Learner) Load(fit *predictor.Fit) (refused map[Subject]error) {
	for _, s := range l.students {
		if err := s.start(fit); err != nil {
			if refused == nil {
				refused = map[Subject]error{}
			}
			refused[s.Subject] = err
		}
	}
	return refused
}

// start begins a student's learning.
func (s *student) start(fit *predictor.Fit) error {
	o, err := predictor.NewOnline(predictor.OnlineConfig{Kind: s.Kind, Fit: fit})
	if err == nil {
		s.online, s.fresh = o, false
	}
	return err
}

// Learn takes an ending in.
func (l *Learner) Learn(e *Ending) {
	for _, s := range l.students {
		switch {
		case s.Model != e.Model:
		case e.Finished:
			s.online.Finished(e.Prompt, e.Output, e.Key)
			s.fresh = true
		default:
			s.online.Censored(1)
		}
	}
}

// Rebuild builds the tables that are due, and reports whether some will be later.
func (l *Learner) Rebuild(now time.Time) (built []Learned, more bool) {
	for _, s := range l.students {
		if p, survival, due := s.online.Rebuild(now); due {
			s.fresh = false
			built = append(built, Learned{s.Subject, &Tables{
				predictor: p, survival: survival, counts: s.online.Counts(), drift: s.online.Drift(), fromFit: s.online.DriftFromFit(),
			}})
		}
		more = more || s.fresh
	}
	return built, more
}
