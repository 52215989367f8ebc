package board

import (
	"time"

	"evenkeel/predictor"
)

// Learner builds the tables from which output lengths are predicted. It is not part of the boards,
// because a table takes longer to build than a tick may last. It gets EffectOutputSample, and
// returns TablesBuilt.
type Learner struct{ predictors []*onlinePredictor }

type onlinePredictor struct {
	PredictorKey
	online        *predictor.Online
	hasNewOutputs bool // since the last tables were built
}

// Follow begins to learn from a fit; nil: from nothing. If the fit does not suit, learning begins
// from nothing. No error is expected, because predictor.ParseFit has checked the fit before.
func (l *Learner) Follow(key PredictorKey, fit *predictor.Fit) (err error) {
	s := &onlinePredictor{PredictorKey: key}
	l.predictors = append(l.predictors, s)
	if err = s.startFrom(fit); err != nil {
		// Perhaps no predictor of this kind can learn. With survival and without a fit, NewOnline cannot
		// fail.
		s.online, _ = predictor.NewOnline(predictor.OnlineConfig{Kind: predictor.KindSurvival})
	}
	return err
}

// Load makes all predictors start anew from a fit. Those that it does not suit stay as they were.
func (l *Learner) Load(fit *predictor.Fit) (refused map[PredictorKey]error) {
	for _, s := range l.predictors {
		if err := s.startFrom(fit); err != nil {
			if refused == nil {
				refused = map[PredictorKey]error{}
			}
			refused[s.PredictorKey] = err
		}
	}
	return refused
}

func (s *onlinePredictor) startFrom(fit *predictor.Fit) error {
	o, err := predictor.NewOnline(predictor.OnlineConfig{Kind: s.Kind, Fit: fit})
	if err == nil {
		s.online, s.hasNewOutputs = o, false
	}
	return err
}

// Learn teaches all predictors of a model an output length.
func (l *Learner) Learn(sample *OutputSample) {
	for _, s := range l.predictors {
		switch {
		case s.Model != sample.Model:
		case sample.Finished:
			s.online.Finished(sample.Prompt, sample.Output, sample.Key)
			s.hasNewOutputs = true
		default: // cut off: the length is not known
			s.online.Censored(1)
		}
	}
}

// Rebuild builds the tables that are due. more: another one will become due even if no other
// request finishes.
func (l *Learner) Rebuild(now time.Time) (built []TablesBuilt, more bool) {
	for _, s := range l.predictors {
		if p, survival, due := s.online.Rebuild(now); due {
			s.hasNewOutputs = false
			built = append(built, TablesBuilt{s.PredictorKey, &Tables{
				predictor: p, survival: survival, counts: s.online.Counts(),
				driftFromTable: s.online.Drift(), driftFromFit: s.online.DriftFromFit(),
			}})
		}
		more = more || s.hasNewOutputs
	}
	return built, more
}
