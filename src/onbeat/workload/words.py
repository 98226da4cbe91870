"""Common English words; nearly every tokenizer has each of them as one token."""

_TEXT = """ able about above accept across action active add after again
against age ago agree air all allow almost alone along already also always among amount and animal another
answer any appear apply area arm army around arrive art ask attack attention away baby back bad bag ball
bank bar base be beach bear beat beautiful because become bed before begin behind believe best better
between big bill bird bit black block blood blue board boat body book born both bottom box boy break bring
brother brown build building burn bus business busy but buy call camera camp can capital captain car card
care carry case catch cause cell center central century certain chair challenge chance change charge check
child choice choose church city claim class clear clearly close coach coffee cold collection college color
come common community company compare computer concern condition consider contain continue control cost
could country couple course court cover create crime culture cup current customer cut dark data day dead
deal death debate decade decide decision deep degree describe design despite detail develop difference
different difficult dinner direction director discover discuss disease do doctor dog door down draw dream
drive drop drug during each early east easy eat economic economy edge education effect effort eight either
election else employee end energy enjoy enough enter entire environment especially establish even evening
event ever every evidence exactly example executive exist expect experience expert explain eye face fact
factor fail fall family far farm fast father fear feel few field fight figure fill film final finally
financial find fine finger finish fire firm first fish five floor fly focus follow food foot for force
foreign forget form former forward four free friend from front full fund future game garden gas general
generation get girl give glass go goal good government great green ground group grow growth guess gun guy
hair half hand hang happen happy hard have head health hear heart heat heavy help here high history hit hold
home hope hospital hot hotel hour house how however huge human hundred idea identify image imagine impact
important improve include increase indeed industry information inside instead institution interest interview
into investment island issue item job join just keep key kid kill kind kitchen know knowledge land language
large last late later laugh law lawyer lay lead leader learn least leave left legal less let letter level
lie life light like likely line list listen little live local long look lose loss lot love low machine
magazine main maintain major majority make man manage many market marriage material matter may maybe mean
measure media medical meet meeting member memory mention message method middle might military million mind
minute miss mission model modern moment money month more morning most mother mouth move movement movie much
music must name nation national natural nature near nearly necessary need network never new news newspaper
next nice night none nor north not note nothing notice now number occur of off offer office officer official
often oil old once one only open operation option order organization other our out outside over own owner
page pain paint paper parent part particular partner party pass past patient pattern pay peace people
perform perhaps period person phone physical pick picture piece place plan plant play player point police
policy political poor popular population position possible power practice prepare present president press
pressure pretty prevent price private problem process produce product production professional program
project property protect prove provide public pull purpose push put quality question quickly quite race
radio raise range rate rather reach read ready real reality realize really reason receive recent record red
reduce reflect region relate relationship remain remember remove report represent require research resource
respond response rest result return reveal rich right rise risk road rock role room rule run safe same save
say scene school science sea season seat second section security see seek seem sell send senior sense series
serious serve service set seven several shake share she shoot short shot should shoulder show side sign
significant similar simple simply since sing single sister sit site situation six size skill skin small
smile so social society soldier some somebody someone something sometimes son song soon sort sound source
south space speak special specific speech spend sport spring staff stage stand standard star start state
statement station stay step still stock stop store story strategy street strong structure student study
stuff style subject success such suddenly suffer suggest summer support sure surface system table take talk
task tax teach teacher team technology television tell ten tend term test than thank that the their them
then theory there these they thing think third this those though thought thousand threat three through
throughout throw thus time to today together tonight too top total tough toward town trade traditional
training travel treat treatment tree trial trip trouble true truth try turn two type under understand unit
until up upon use usually value various very victim view violence visit voice vote wait walk wall want war
watch water way we weapon wear week weight well west what when where which while white who whole why wide
wife will win wind window wish with within without woman wonder word work worker world worry would write
writer wrong yard year yellow yes yet you young your
"""

COMMON_WORDS: tuple[str, ...] = tuple(_TEXT.split())
