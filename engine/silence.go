package engine

import (
	"errors"

	"evenkeel/sse"
)

// WasSilent says whether an engine took a request and then sent nothing within a time limit, either at first or in the middle of
// its answer.
func WasSilent(err error) bool {
	if errors.Is(err, sse.ErrSilent) {
		return true
	}
	var callErr *Error
	return errors.As(err, &callErr) && callErr.Timeout && callErr.Phase >= PhaseHead // in earlier phases the request was not written
}
