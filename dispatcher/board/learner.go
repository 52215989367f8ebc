package board

import (
	"time"

	"evenkeel/predictor"
)

// Learner builds the tables from which output lengths are predicted. It learns from the requests that have left their ranks. It is not part
// of the boards, because a table takes longer to build than a tick may last. The boards emit the samples as effects (EffectOutputSample),
// and get the tables back as events (TablesBuilt).
type Learner struct{ predictors []*onlinePredictor }

// onlinePredictor learns the output lengths of one model, for one kind of predictor.
type onlinePredictor struct {
	PredictorKey
	online        *predictor.Online
	hasNewOutputs bool // a request has finished since the last tables were built
}

// Follow begins to learn for the predictor with this key, from a fit; nil: from nothing. If the fit does not suit the predictor, err says
// why, and learning begins from nothing. No error is expected, because predictor.ParseFit has checked the fit before.
func (l *Learner) Follow(key PredictorKey, fit *predictor.Fit) (err error) {
	s := &onlinePredictor{PredictorKey: key}
	l.predictors = append(l.predictors, s)
	if err = s.startFrom(fit); err != nil {
		// The error may also say that no predictor of this kind can learn. With survival and without a fit, NewOnline cannot fail.
		s.online, _ = predictor.NewOnline(predictor.OnlineConfig{Kind: predictor.KindSurvival})
	}
	return err
}

// Load makes all predictors forget what they learned and start from a fit. It returns an error for each predictor that the fit does not
// suit; these predictors stay as they were.
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

// startFrom makes the predictor forget what it learned and start from the fit; nil: from nothing. After an error, the predictor is as it
// was before.
func (s *onlinePredictor) startFrom(fit *predictor.Fit) error {
	o, err := predictor.NewOnline(predictor.OnlineConfig{Kind: s.Kind, Fit: fit})
	if err == nil {
		s.online, s.hasNewOutputs = o, false
	}
	return err
}

// Learn teaches all predictors of a model the output length of a request of this model that has left its rank.
func (l *Learner) Learn(sample *OutputSample) {
	for _, s := range l.predictors {
		switch {
		case s.Model != sample.Model: // the length says nothing about other models
		case sample.Finished:
			s.online.Finished(sample.Prompt, sample.Output, sample.Key)
			s.hasNewOutputs = true
		default: // the answer was cut off, so its length is not known
			s.online.Censored(1)
		}
	}
}

// Rebuild builds the tables that are due. Each table comes with two drifts, for the status: how much the lengths of the last outputs differ
// from the new table, and from the fit file that learning started from. more says whether a table will become due later even if no other
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
