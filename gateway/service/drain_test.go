package service

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
)

// moment is what others see of a proxy.
type moment struct {
	draining, refusing, over bool
	ended                    int // how often what runs on engines was ended
}

// A row is what an operator does at the start, and ten seconds later; load balancers have five
// seconds. Then what others see right after each, at the end of the five seconds, and two minutes
// later.
func TestAProxyGoesOutOfServiceInSteps(t *testing.T) {
	const grace = 5 * time.Second
	drain := func(limit time.Duration) func(*Service) { return func(s *Service) { s.Drain(limit) } }
	undrain, refuse, nothing := (*Service).Undrain, (*Service).RefuseForExit, func(*Service) {}
	inService, told, refuses := moment{}, moment{draining: true}, moment{draining: true, refusing: true}
	over := moment{draining: true, refusing: true, over: true, ended: 1}
	for name, tt := range map[string]struct {
		first, then                       func(*Service)
		atOnce, graceOver, thenSeen, last moment
	}{
		"a drain without a limit ends nothing":                         {drain(0), nothing, told, refuses, refuses, refuses},
		"a drain with a limit ends what still runs":                    {drain(time.Minute), nothing, told, refuses, refuses, over},
		"a drain that is taken back ends nothing":                      {drain(time.Minute), undrain, told, refuses, inService, inService},
		"a drain that is over can be taken back":                       {drain(grace), undrain, told, over, moment{ended: 1}, moment{ended: 1}},
		"a second limit takes the place of the first one":              {drain(time.Minute), drain(time.Hour), told, refuses, refuses, refuses},
		"a second call without a limit takes the first one away":       {drain(time.Minute), drain(0), told, refuses, refuses, refuses},
		"what is refused at once has no grace":                         {refuse, nothing, refuses, refuses, refuses, refuses},
		"a drain after that sets a limit and takes nothing more":       {refuse, drain(time.Second), refuses, refuses, refuses, over},
		"nothing is taken back where nothing drains":                   {undrain, nothing, inService, inService, inService, inService},
		"a drain soon after the last was taken back has its own grace": {func(s *Service) { s.Drain(0); s.Undrain(); s.Drain(0) }, nothing, told, refuses, refuses, refuses},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ended := 0
				s := New(Deps{Context: t.Context(), Log: zap.NewNop(), Grace: func() time.Duration { return grace },
					EndAll: func() int { ended++; return 3 }})
				defer s.Close()
				see := func() moment {
					synctest.Wait()
					m := moment{draining: s.Draining(), refusing: s.Refusing(), over: s.Context().Err() != nil, ended: ended}
					state := s.State()
					require.Equal(t, m.draining, state != nil)
					if state != nil {
						require.Equal(t, DrainState{Since: state.Since, Deadline: state.Deadline, Refusing: m.refusing, Over: m.over}, *state)
					}
					return m
				}
				tt.first(s)
				require.Equal(t, tt.atOnce, see(), "at once")
				time.Sleep(grace)
				require.Equal(t, tt.graceOver, see(), "after the grace")
				time.Sleep(grace)
				tt.then(s)
				require.Equal(t, tt.thenSeen, see(), "after the second act")
				time.Sleep(2 * time.Minute)
				require.Equal(t, tt.last, see(), "two minutes later")
			})
		})
	}
}

func TestADrainSaysHowLongItStillTakesRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Deps{Context: t.Context(), Log: zap.NewNop(), Grace: func() time.Duration { return 5 * time.Second },
			EndAll: func() int { return 0 }})
		defer s.Close()
		require.Equal(t, 5*time.Second, s.Drain(0))
		time.Sleep(2 * time.Second)
		require.Equal(t, 3*time.Second, s.Drain(time.Minute), "the grace does not begin anew")
		require.Equal(t, time.Now().Add(time.Minute), *s.State().Deadline)
		time.Sleep(3 * time.Second)
		require.Zero(t, s.Drain(0))
		require.Nil(t, s.State().Deadline)
	})
}
