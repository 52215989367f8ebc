package engine

import (
	"errors"

	"evenkeel/sse"
)

// WasSilent says whether an engine that took a request let its time pass.
func WasSilent(err error) bool {
	var ee *Error
	return errors.Is(err, sse.ErrSilent) || errors.As(err, &ee) && ee.Timeout && ee.Phase >= PhaseHead
}
